"""Who is slow beside the others: each rank's own part of a step, against the median of its peers'."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.core.splits import Part, Split

COST_RATIO_MIN = 0.05
"""What costs less than this share of a step is left alone."""
_SCATTER = 3 * 1.4826
"""So many median absolute deviations: three standard deviations, where the scatter is normal."""
_PEERS_THAT_SCATTER = 4


def excess(own: Split, peers: Sequence[Split], part: Part) -> float:
    """Seconds that a part takes longer than the median of the peers'; below zero where it is shorter."""
    return own.of(part) - median(peer.of(part) for peer in peers)


def is_slow(own: Split, peers: Sequence[Split], slower_than: float) -> bool:
    """Whether the others wait for this one more than the policy bears."""
    usual_s = median(peer.work_s for peer in peers)
    if len(peers) >= _PEERS_THAT_SCATTER:
        scatter_s = median(abs(peer.work_s - usual_s) for peer in peers)
        if own.work_s - usual_s <= _SCATTER * scatter_s:
            return False
    return _costs(own, usual_s, slower_than)


def _costs(own: Split, usual_s: float, slower_than: float) -> bool:
    more_s = own.work_s - usual_s
    return more_s >= (slower_than - 1.0) * usual_s and more_s >= COST_RATIO_MIN * own.step_s


class Crowd:
    """The newest windows of all ranks, to compare each with the others.

    To look at each of a thousand beside all others would take a second of the leader's time; most are seen to be well
    at once.

    Args:
        splits: by rank.
        stale: steps after which a window is of another time.
    """

    def __init__(self, splits: Mapping[str, Split], stale: int) -> None:
        self._splits, self._stale = splits, stale
        self._works: dict[int, list[float]] = {}

    def peers(self, rank: str) -> list[Split]:
        """What the others say of about the same steps."""
        old = self._splits[rank].step - self._stale
        return [split for other, split in self._splits.items() if other != rank and split.step >= old]

    def is_alone(self, rank: str) -> bool:
        """Whether nobody says anything of about the same steps."""
        return len(self._works_since(self._splits[rank].step - self._stale)) < 2

    def is_slow(self, rank: str, slower_than: float) -> bool:
        """`is_slow` of a rank that is not alone."""
        own = self._splits[rank]
        usual_s = _median_without(self._works_since(own.step - self._stale), own.work_s)
        return _costs(own, usual_s, slower_than) and is_slow(own, self.peers(rank), slower_than)

    def _works_since(self, step: int) -> list[float]:
        """What all work on a step, those included who are asked about, in order."""
        if step not in self._works:
            self._works[step] = sorted(split.work_s for split in self._splits.values() if split.step >= step)
        return self._works[step]


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The median of what is left of at least two values, in order, without `one` of them."""
    place, left = bisect_left(ordered, one), len(ordered) - 1
    middle = [ordered[index + (index >= place)] for index in {(left - 1) // 2, left // 2}]
    return median(middle)
