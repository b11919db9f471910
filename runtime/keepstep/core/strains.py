"""What strains a host: found between two looks at it, and told so that nobody hears of the same thing twice.

A strain is evidence for why a host is slow, or a warning of what is about to fail; it is no verdict, and nothing is
stopped over it. `find_strains` compares two samples, `settle` keeps what is told from flapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keepstep.core.host_sample import Disk, Fabric, HostSample, Interface, Strain, StrainKind, Told

WINDOW_S = 15.0
"""Samples that are compared lie so far apart: longer than a save's burst of writing, and soon enough."""
HOLD_S = 30.0
"""So long a strain is told of after it was last seen, and its figure after it was true: what comes and goes is one."""
A_LOT = 1.5
"""By this factor a figure must change to be told again."""

QUOTA_MIN = 0.05
"""Of the time that the job wanted processors. Less than a twentieth is within what steps differ by anyway."""
STEAL_MIN = 0.05
"""Of all processor time: a hypervisor always takes a little, by its own account."""
NEIGHBOURS_MIN = 0.10
"""Of all processor time; the system's own services come to less."""
IDLE_MAX = 0.20
"""With more of all processor time left over, nobody is kept waiting by others for long."""
CPU_WAIT_MIN = 0.10
"""Of the time: what waits less finds a free processor nearly always."""
MEMORY_WAIT_MIN = 0.05
"""Of the time. A host with enough memory does not wait for it at all."""
IO_WAIT_MIN = 0.20
"""Of the time: somebody who reads ahead waits now and then, as he should."""
SHORT_RATIO, SHORT_BYTES = 0.05, 1 << 30
"""Disk and memory are short with less left than both: a twentieth of a large one lasts for long, and of a small one, as
containers' /dev/shm is, a GB is never there."""
FILES_RATIO = 0.01
"""Of the files that a disk has room for."""
DESCRIPTORS_RATIO = 0.8
"""Of the limit; a restart opens some hundreds at once."""
CLOCK_STEP_S = 0.5
"""NTP turns a clock by 7.5 ms within a window; what is set by more than this was set."""
HEAT_C = 5.0
"""So near to what is too hot for it a part is about to be slowed down."""
SILENT_S = 10.0
"""A file system that has not answered for two looks: its server is away, or its disk is."""
DROPS_MIN, DROPS_RATIO = 10, 0.001
"""Of an interface's packets: some are dropped always, since they are in a protocol that nobody here speaks."""
RESENT_MIN, RESENT_RATIO = 50, 0.01
"""Of TCP's segments: losing a hundredth more than halves a line's throughput (Mathis, 1997); few prove nothing."""
FABRIC_MIN = 10
"""Of what should not happen; a few come with every connection that ends."""
GRAVE = frozenset({"link_downed", "unresponsive_remote_events", "impaired_remote_conn_events"})
"""What a fabric counts that no connection gets over by itself: one is enough."""
SENT, RESENT = "tx_pkts", "retrans_pkts"


def strains_of_host(before: HostSample, after: HostSample) -> tuple[str, ...]:
    """What strains a host, in words, by two samples of it; of one alone, given twice, only what it is short of."""
    return tuple(strain.text for strain in find_strains(before, after))


def find_strains(before: HostSample, after: HostSample) -> tuple[Strain, ...]:
    """What strained a host between two samples, or does at the later one, in the order of the kinds."""
    return tuple(strain for look in _LOOKS for strain in look(before, after))


def settle(told: tuple[Told, ...], found: tuple[Strain, ...], at: float) -> tuple[Told, ...]:
    """What is to be told from now on, in the order of the kinds.

    What is new is told at once, and is told until HOLD_S after it was last seen. Its words change where its figure has
    been another one by a lot for HOLD_S.
    """
    known = {(each.strain.kind, each.strain.what): each for each in told}
    kept = {key: each for key, each in known.items() if at < each.seen_at + HOLD_S}
    for strain in found:
        key = strain.kind, strain.what
        old = known.get(key)
        far = old is not None and _differs_a_lot(old.strain.figure, strain.figure)
        if old is None or (far and at >= old.near_at + HOLD_S):
            kept[key] = Told(strain, at, at)
        else:
            kept[key] = Told(old.strain, old.near_at if far else at, at)
    order = list(StrainKind)
    return tuple(kept[key] for key in sorted(kept, key=lambda key: (order.index(key[0]), key[1])))


def _differs_a_lot(one: float, other: float) -> bool:
    low, high = sorted((abs(one), abs(other)))
    return high > A_LOT * low or (one < 0) != (other < 0)


# --- processors and memory -------------------------------------------------------------------------------------------


def _quota(before: HostSample, after: HostSample) -> Iterator[Strain]:
    """What was withheld, of what was wanted: that and what was had."""
    withheld = _grown(before.throttled_s, after.throttled_s)
    had = _grown(before.group_cpu_s, after.group_cpu_s)
    if had is None:
        had = _grown(before.own_cpu_s, after.own_cpu_s)
    if withheld is None or had is None or withheld + had <= 0:
        return
    share = withheld / (withheld + had)
    if share >= QUOTA_MIN and withheld >= QUOTA_MIN * (after.at - before.at):  # who hardly wants any is hardly hurt
        yield Strain(StrainKind.CPU_QUOTA, "", share, f"cpu held back by its quota {percent(share)} of the time")


def _steal(before: HostSample, after: HostSample) -> Iterator[Strain]:
    share = _share(before.cpu_stolen_s, after.cpu_stolen_s, _grown(before.cpu_s, after.cpu_s))
    if share is not None and share >= STEAL_MIN:
        yield Strain(StrainKind.CPU_STEAL, "", share, f"cpu taken by other guests {percent(share)}")


def _neighbours(before: HostSample, after: HostSample) -> Iterator[Strain]:
    """Other processes of this machine count where they leave nothing over."""
    whole, idle = _grown(before.cpu_s, after.cpu_s), _grown(before.cpu_idle_s, after.cpu_idle_s)
    own = _grown(before.own_cpu_s, after.own_cpu_s)
    if not whole or idle is None or own is None or idle > IDLE_MAX * whole:
        return
    waited = _share(before.cpu_waited_s, after.cpu_waited_s, after.at - before.at)
    crowded = waited >= CPU_WAIT_MIN if waited is not None else (after.load or 0.0) > (after.processors or 1)
    stolen = _grown(before.cpu_stolen_s, after.cpu_stolen_s) or 0.0
    share = max(0.0, whole - idle - stolen - own) / whole
    if crowded and share >= NEIGHBOURS_MIN:
        yield Strain(StrainKind.CPU_NEIGHBOURS, "", share, f"cpu taken by other processes {percent(share)}")


def _waits(before: HostSample, after: HostSample) -> Iterator[Strain]:
    passed_s = after.at - before.at
    memory = _share(before.memory_waited_s, after.memory_waited_s, passed_s)
    if memory is not None and memory >= MEMORY_WAIT_MIN:
        yield Strain(StrainKind.MEMORY_WAIT, "", memory, f"waits for memory {percent(memory)} of the time")
    io = _share(before.io_waited_s, after.io_waited_s, passed_s)
    if io is not None and io >= IO_WAIT_MIN:
        yield Strain(StrainKind.IO_WAIT, "", io, f"waits for io {percent(io)} of the time")


def _memory(before: HostSample, after: HostSample) -> Iterator[Strain]:
    left = [
        (limit - used, limit, whose)
        for limit, used, whose in (
            (after.memory_limit_bytes, after.memory_used_bytes, "the container's"),
            (after.memory_total_bytes, _less(after.memory_total_bytes, after.memory_available_bytes), "the machine's"),
        )
        if limit is not None and used is not None
    ]
    short = [(max(0, free), whose) for free, limit, whose in left if _is_short(free, limit)]
    if short:
        free, whose = min(short)
        yield Strain(StrainKind.MEMORY_SHORT, "", free, f"{size(free)} of {whose} memory left")
    killed = _counted(before.oom_kills, after.oom_kills)
    if killed:
        noun = "process" if killed == 1 else "processes"
        yield Strain(StrainKind.OOM_KILLS, "", killed, f"{killed} {noun} killed for want of memory")


def _thermal(before: HostSample, after: HostSample) -> Iterator[Strain]:
    slowed = _counted(before.thermal_slowdowns, after.thermal_slowdowns)
    if slowed:
        text = f"{slowed} thermal {'slowdown' if slowed == 1 else 'slowdowns'}"
        yield Strain(StrainKind.THERMAL, "", slowed, text)
    now, most = after.temperature_c, after.temperature_max_c
    if now is not None and most is not None and now >= most - HEAT_C:
        yield Strain(StrainKind.THERMAL, "heat", now, f"{now:.0f} °C where {most:.0f} are too much")


# --- disks, clock, descriptors ---------------------------------------------------------------------------------------


def _disks(before: HostSample, after: HostSample) -> Iterator[Strain]:
    for disk in after.disks:
        yield from _disk(disk)
    known = dict(before.disk_errors)
    for name, count in after.disk_errors:
        more = count - known.get(name, count)
        if more > 0:
            text = f"file system {name} has {more} new {'error' if more == 1 else 'errors'}"
            yield Strain(StrainKind.DISK_ERRORS, name, more, text)


def _disk(disk: Disk) -> Iterator[Strain]:
    folder = disk.folder
    if disk.silent_s:
        if disk.silent_s >= SILENT_S:
            text = f"disk {folder} has not answered for {disk.silent_s:.0f} s"
            yield Strain(StrainKind.DISK_SILENT, folder, disk.silent_s, text)
        return
    if disk.read_only:
        yield Strain(StrainKind.DISK_READ_ONLY, folder, 1.0, f"disk {folder} can only be read")
    elif _is_short(disk.free_bytes, disk.size_bytes):
        text = f"disk {folder} has {size(disk.free_bytes)} left"
        yield Strain(StrainKind.DISK_SHORT, folder, disk.free_bytes, text)
    elif disk.files_free < FILES_RATIO * disk.files:
        text = f"disk {folder} has room for {disk.files_free} more files"
        yield Strain(StrainKind.DISK_FILES, folder, disk.files_free, text)


def _clock(before: HostSample, after: HostSample) -> Iterator[Strain]:
    if before.unix_s is None or after.unix_s is None:
        return
    step_s = (after.unix_s - before.unix_s) - (after.at - before.at)
    if abs(step_s) >= CLOCK_STEP_S:
        yield Strain(StrainKind.CLOCK_STEP, "", step_s, f"clock was set by {step_s:+.1f} s")


def _descriptors(before: HostSample, after: HostSample) -> Iterator[Strain]:
    for each in after.descriptors:
        if each.open >= DESCRIPTORS_RATIO * each.limit:
            text = f"{each.open} of {each.limit} file descriptors open ({each.holder})"
            yield Strain(StrainKind.DESCRIPTORS, each.holder, each.open, text)


# --- network ---------------------------------------------------------------------------------------------------------


def _interfaces(before: HostSample, after: HostSample) -> Iterator[Strain]:
    known = {each.name: each for each in before.interfaces}
    for each in after.interfaces:
        yield from _interface(known.get(each.name, each), each)


def _interface(before: Interface, after: Interface) -> Iterator[Strain]:
    errors, drops = after.errors - before.errors, after.drops - before.drops
    lost = max(0, errors) + max(0, drops)
    if lost >= max(DROPS_MIN, DROPS_RATIO * (after.packets - before.packets)):
        words = [f"{count} {noun}" for count, noun in ((errors, "errors"), (drops, "drops")) if count > 0]
        yield Strain(StrainKind.INTERFACE, after.name, lost, f"network {after.name}: {', '.join(words)}")


def _tcp(before: HostSample, after: HostSample) -> Iterator[Strain]:
    resent, sent = _counted(before.tcp_resent, after.tcp_resent), _counted(before.tcp_sent, after.tcp_sent)
    if resent is None or sent is None or resent < RESENT_MIN:
        return
    share = resent / (sent + resent)
    if share >= RESENT_RATIO:
        yield Strain(StrainKind.TCP_RESENT, "", share, f"tcp retransmits {percent(share)}")


def _fabrics(before: HostSample, after: HostSample) -> Iterator[Strain]:
    known = {each.name: each for each in before.fabrics}
    for each in after.fabrics:
        yield from _fabric(known.get(each.name, each), each)


def _fabric(before: Fabric, after: Fabric) -> Iterator[Strain]:
    """Where packets are counted, too, those sent again are looked at as TCP's are."""
    known = dict(before.counters)
    grown = {name: max(0, count - known.get(name, count)) for name, count in after.counters}
    sent, resent = grown.pop(SENT, 0), grown.pop(RESENT, 0)
    bad = {name: count for name, count in grown.items() if count >= (1 if name in GRAVE else FABRIC_MIN)}
    if resent >= max(RESENT_MIN, RESENT_RATIO * sent):
        bad[RESENT] = resent
    if bad:
        text = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(bad.items()))
        yield Strain(StrainKind.FABRIC, after.name, sum(bad.values()), f"{after.name}: {text}")


# --- figures ---------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share in words, to two digits."""
    shown = min(100.0, 100.0 * share)
    return f"{shown:.0f} %" if shown >= 9.95 else f"{shown:.1f} %".replace(".0 %", " %")


def size(size_bytes: int) -> str:
    """Bytes in words, to two digits, in powers of ten."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            shown = size_bytes / factor
            return f"{shown:.0f} {unit}" if shown >= 9.95 else f"{shown:.1f} {unit}"
    return f"{size_bytes} B"


def _is_short(free: int, whole: int) -> bool:
    return free < min(SHORT_RATIO * whole, SHORT_BYTES)


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def _counted(before: int | None, after: int | None) -> int | None:
    """By how much a counter has grown; None where that is not known, or where it began anew."""
    return None if before is None or after is None or after < before else after - before


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or after < before else after - before


def _share(before: float | None, after: float | None, whole: float | None) -> float | None:
    part = _grown(before, after)
    return None if part is None or not whole or whole < 0 else part / whole


_LOOKS: tuple[Callable[[HostSample, HostSample], Iterator[Strain]], ...] = (
    _quota,
    _steal,
    _neighbours,
    _waits,
    _memory,
    _disks,
    _clock,
    _descriptors,
    _thermal,
    _interfaces,
    _tcp,
    _fabrics,
)
