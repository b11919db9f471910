"""Which host is bad, by what all of them have measured: each is held against the others, none against a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from keepstep.core.preflight_records import Check, Guest, Link, PreflightPlan, PreflightRecord, Rate
from keepstep.core.values import frozen
from keepstep.errors import ExitCode

SLOW_RATIO = 0.7
"""Of what the others do: machines of one kind differ by a tenth and a busy moment takes as much again; who is slower
than this keeps all others waiting for a third of each step."""
LINK_RATIO = 0.5
"""Of what the others' lines do: a stream of seconds scatters more than what a processor does, as both ends' other
work is in it; where several hosts shared a machine, 0.63 was seen of a line that nothing was wrong with."""
LINE_RATIO = 0.3
"""Of what others have, for one line alone: it was seen once, and others share it. It tells of its two ends, and not of
which: 0.23 was seen of a line that nothing was wrong with, where one end's other line led to a bad host."""
LINK_ENOUGH = 1.25e9
"""Bytes a second, 10 Gbit/s: beyond it the measure's own stream is what is slow, and differences mean nothing."""
LINK_FLOOR = 20e6
"""Bytes a second: slow by itself, where there is nobody to compare with. No machine with a network of its own has so
little."""
SKEW_S_MAX = 1.0
"""Seconds: clocks that are kept differ by milliseconds, and which failure came first is told by them."""
_ROUNDS = 2
_HARDWARE = (Check.GPU, Check.MATMUL, Check.SPEED, Check.MEMORY, Check.DISK, Check.CLOCK)
_UNITS = {Check.MATMUL: (1e12, "TFLOP/s"), Check.GPU: (1.0, "")}
_MEGA = (1e6, "MB/s")


@frozen
class Flaw:
    """What is wrong, with whom, and the evidence. Of several hosts it is one, or what lies between them.

    `share` is what it does of what others do, 0 where something does not work at all.
    """

    check: Check
    hosts: tuple[str, ...]
    text: str
    share: float = 0.0

    @property
    def exit_code(self) -> ExitCode:
        """The job's, where this ends it."""
        return ExitCode.HARDWARE if self.check in _HARDWARE else ExitCode.TOO_FEW_HOSTS

    def tell(self) -> str:
        return f"{' or '.join(self.hosts)}: {self.check.value}: {self.text}"


def partners_of(plan: PreflightPlan, host: str) -> tuple[Guest, ...]:
    """Whom a host is to measure its line with, in order; the other one of a pair does nothing but answer.

    In each round hosts are paired, and regrouped in the next one: so who is slow in both can be told from who was
    paired with one that is.
    """
    guests = plan.guests
    place = next((at for at, guest in enumerate(guests) if guest.host == host), -1)
    if place < 0:
        return ()
    if len(guests) <= _ROUNDS and plan.others:
        firsts = range(_ROUNDS * place, _ROUNDS * place + min(_ROUNDS, len(plan.others)))
        return tuple(plan.others[at % len(plan.others)] for at in firsts)
    found = []
    for number, pairs in enumerate(_rounds(len(guests))):
        for one, other in pairs:
            first, second = (one, other) if number % 2 == 0 else (other, one)
            if first == place:
                found.append(guests[second])
    return tuple(found)


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of places for each round: everybody has a partner in each, and never the same one twice.

    Of an odd number one sits out in each round, so there is one round more.
    """
    even = count + count % 2
    circle = list(range(even))
    rounds = []
    for _ in range(min(even - 1, _ROUNDS + count % 2)):
        pairs = [(circle[at], circle[-1 - at]) for at in range(even // 2)]
        rounds.append([pair for pair in pairs if max(pair) < count])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def find_flaws(plan: PreflightPlan, records: Mapping[str, PreflightRecord]) -> tuple[Flaw, ...]:
    """What is wrong with the guests, the worst first.

    Args:
        plan: whose guests are judged.
        records: by host, of those who have answered, and of others that were checked before.
    """
    answered = [records[g.host] for g in plan.guests if _has_answered(records.get(g.host), plan.number, g)]
    there = {record.host for record in answered}
    silent = [guest.host for guest in plan.guests if guest.host not in there]
    flaws = [Flaw(Check.ANSWER, (host,), "no answer within the bound") for host in silent]
    for record in answered:
        flaws += [Flaw(complaint.check, (record.host,), complaint.text) for complaint in record.complaints]
        flaws += _slow(record, [other for other in records.values() if other.host not in (record.host, *silent)])
    known = {host: record for host, record in records.items() if host not in silent}
    flaws += [
        flaw for flaw in _between(known, silent) if not {guest.host for guest in plan.guests}.isdisjoint(flaw.hosts)
    ]
    return tuple(sorted(flaws, key=lambda flaw: flaw.share))


def _has_answered(record: PreflightRecord | None, number: int, guest: Guest) -> bool:
    return record is not None and (record.number, record.node_id) == (number, guest.node_id)


def _slow(record: PreflightRecord, others: list[PreflightRecord]) -> list[Flaw]:
    """What a host does less of than others of its kind that were measured as it was."""
    found = []
    alike = [other for other in others if (other.machine, other.quiet) == (record.machine, record.quiet)]
    for rate in record.rates:
        peers = [each.value for other in alike for each in other.rates if each.check is rate.check]
        usual, counts = median(peers) if peers else 0.0, rate.check is Check.GPU
        if rate.value < (usual if counts else SLOW_RATIO * usual):
            text = f"{show(rate)}, others {show(Rate(rate.check, usual))}"
            found.append(Flaw(rate.check, (record.host,), text, 0.0 if counts else rate.value / usual))
    return found


def show(rate: Rate) -> str:
    """A rate for people."""
    scale, unit = _UNITS.get(rate.check, _MEGA)
    return f"{rate.value / scale:.{0 if rate.value >= 10 * scale or not unit else 2}f} {unit}".strip()


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two that are; `statistics` would take longer to import than all of this."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


# --- lines -----------------------------------------------------------------------------------------------------------


def _between(records: Mapping[str, PreflightRecord], silent: Iterable[str]) -> list[Flaw]:
    """What is wrong with lines and clocks: a host's, where all of its lines are bad, else what lies between two."""
    dumb = set(silent)
    lines = [
        (record.host, link)
        for record in records.values() for link in record.links if link.peer not in dumb
    ]  # fmt: skip
    hosts = sorted({host for one, link in lines for host in (one, link.peer)})
    if not hosts:
        return []
    rates = {host: [_rate(link) for one, link in lines if host in (one, link.peer)] for host in hosts}
    best = {host: max(found) for host, found in rates.items()}
    usual = {host: median([best[other] for other in hosts if other != host]) for host in hosts}
    flaws: list[Flaw] = []
    worst: set[str] = set()
    well = {host: sum(1 for other in _ends(lines, host) if best[other] > 0) for host in hosts}
    # of those that nothing came through, whoever was tried by more that are well is the likelier one
    for host in sorted(hosts, key=lambda each: (best[each], -well[each])) if len(hosts) > 2 else ():
        clean = sum(1 for one, link in lines if host in (one, link.peer) and worst.isdisjoint((one, link.peer)))
        # one line alone that is slow tells as much of its other end; no line that works is no accident
        if (clean > 1 or (clean and not best[host])) and best[host] < min(LINK_RATIO * usual[host], LINK_ENOUGH):
            worst.add(host)
            told = "; ".join(_told(one, link, host) for one, link in lines if host in (one, link.peer))
            text = f"{told}; others {usual[host] / 1e6:.0f} MB/s"
            flaws.append(Flaw(Check.LINK, (host,), text, best[host] / usual[host]))
    least = LINK_FLOOR if len(hosts) == 2 else max(LINK_FLOOR, LINE_RATIO * median(list(best.values())))
    for one, link in lines:
        if worst.isdisjoint((one, link.peer)) and _rate(link) < min(least, LINK_ENOUGH):
            text = f"{_told(one, link, one)}; wanted {least / 1e6:.0f} MB/s"
            flaws.append(Flaw(Check.LINK, (one, link.peer), text, _rate(link) / least))
    return flaws + _clocks(lines, hosts)


def _ends(lines: list[tuple[str, Link]], host: str) -> list[str]:
    """The other ends of a host's lines."""
    return [link.peer if one == host else one for one, link in lines if host in (one, link.peer)]


def _rate(link: Link) -> float:
    return 0.0 if link.error else min(link.sent, link.received)


def _told(one: str, link: Link, host: str) -> str:
    """What a line was like, as one of its ends sees it."""
    peer = link.peer if host == one else one
    if link.error:
        return f"{link.peer} is not reached from {one}: {link.error}"
    sent, received = (link.sent, link.received) if host == one else (link.received, link.sent)
    return f"{sent / 1e6:.1f} MB/s to {peer}, {received / 1e6:.1f} MB/s from it"


def _clocks(lines: list[tuple[str, Link]], hosts: list[str]) -> list[Flaw]:
    """Whose clock is another than that of all whom it was compared with."""
    flaws = []
    for host in hosts:
        ahead = [link.ahead_s if link.peer == host else -link.ahead_s for one, link in lines
                 if host in (one, link.peer) and not link.error]  # fmt: skip
        least = min(ahead, key=abs, default=0.0)
        if abs(least) > SKEW_S_MAX:
            where = "ahead" if least > 0 else "behind"
            flaws.append(Flaw(Check.CLOCK, (host,), f"its clock is {abs(least):.1f} s {where} of the others'"))
    if len(hosts) == 2 and len(flaws) == 2:
        return [Flaw(Check.CLOCK, tuple(hosts), f"their clocks differ by {abs(lines[0][1].ahead_s):.1f} s")]
    return flaws
