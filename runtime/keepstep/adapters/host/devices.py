"""Heat, memory and file systems of the machine, and who has how many files open.

Source: proc(5), the kernel's Documentation/ABI/testing/sysfs-devices-system-cpu, sysfs-class-thermal, sysfs-fs-ext4.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from keepstep.adapters.host.files import entries_of, is_folder, number_of, table_of, text_of, whole
from keepstep.core.host_sample import Descriptors

_TOO_HOT = ("hot", "critical")


def machine_memory(proc: Path) -> tuple[int | None, int | None]:
    """Bytes that the machine can still give, and all that it has."""
    table = table_of(proc / "meminfo")
    available, total = table.get("MemAvailable"), table.get("MemTotal")
    return None if available is None else available << 10, None if total is None else total << 10


def machine_oom_kills(proc: Path) -> int | None:
    """Processes of the whole machine that the kernel has killed for want of memory."""
    return table_of(proc / "vmstat").get("oom_kill")


def slowdowns_of(system: Path) -> int | None:
    """How often cores and packages were slowed down because they were hot; each of these counted once."""
    counts: dict[tuple[str, ...], int] = {}
    for folder in entries_of(system / "devices" / "system" / "cpu"):
        if not is_folder(folder / "thermal_throttle"):
            continue
        package = text_of(folder / "topology" / "physical_package_id").strip()
        core = text_of(folder / "topology" / "core_id").strip() or folder.name
        for key, name in (((package, core), "core_throttle_count"), ((package,), "package_throttle_count")):
            count = number_of(folder / "thermal_throttle" / name)
            if count is not None:
                counts[key] = max(count, counts.get(key, 0))
    return sum(counts.values()) if counts else None


def heat_of(system: Path) -> tuple[float | None, float | None]:
    """Degrees Celsius of that thermal zone which is nearest to what is too hot for it, and that; None for no bound."""
    zones = []
    for zone in entries_of(system / "class" / "thermal"):
        now = number_of(zone / "temp")
        if now is None:
            continue
        bounds = [
            bound
            for trip in entries_of(zone)
            if trip.name.endswith("_type")
            and text_of(trip).strip() in _TOO_HOT
            and (bound := number_of(zone / trip.name.replace("_type", "_temp"))) is not None
            and bound > 0
        ]
        zones.append((now / 1000, min(bounds) / 1000 if bounds else None))
    bounded = [(bound - now, now, bound) for now, bound in zones if bound is not None]
    if bounded:
        _, now_c, bound_c = min(bounded)
        return now_c, bound_c
    return max((now for now, _ in zones), default=None), None


def disk_errors_of(system: Path) -> tuple[tuple[str, int], ...]:
    """Errors that each ext4 file system of the machine has met in its life."""
    folders = entries_of(system / "fs" / "ext4")
    read = [(folder.name, number_of(folder / "errors_count")) for folder in folders]
    return tuple((name, count) for name, count in read if count is not None)


def descriptors_of(proc: Path, agent: int, others: Iterable[int]) -> tuple[Descriptors, ...]:
    """Open files of the agent, of that other process which is nearest to its limit, and of the machine."""
    found = []
    mine = _open_files(proc / str(agent))
    if mine is not None:
        found.append(Descriptors("agent", *mine))
    full = [each for pid in others if pid != agent and (each := _open_files(proc / str(pid))) is not None]
    if full:
        found.append(Descriptors("worker", *max(full, key=lambda each: each[0] / each[1])))
    words = text_of(proc / "sys" / "fs" / "file-nr").split()
    taken, most = (whole(words[0]), whole(words[2])) if len(words) == 3 else (None, None)
    if taken is not None and most:
        found.append(Descriptors("host", taken, most))
    return tuple(found)


def _open_files(process: Path) -> tuple[int, int] | None:
    """How many a process has, and may have; None where it can not be looked at or may have any number."""
    for line in text_of(process / "limits").splitlines():
        if line.startswith("Max open files"):
            limit = whole(line.split()[3])
            return (len(entries_of(process / "fd")), limit) if limit else None
    return None
