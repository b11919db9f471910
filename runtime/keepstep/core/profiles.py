"""What a leader knows of a slow rank, what it has looked at beside a healthy one, and what comes of that."""

from __future__ import annotations

from typing import Literal

from keepstep.core.splits import Part, Split
from keepstep.core.values import frozen


@frozen
class Straggler:
    """A rank that all others wait for.

    Attributes:
        part: what it is slow in.
        work_ratio: its own work over the median of its peers'.
        excess_s: seconds of a step by which that part is longer than the median of its peers'.
        step_s: seconds of a step.
        cost_ratio: the share of a step that all would be done sooner without it.
        since: the step at which the first window ended in which it was slow.
        past_ratio: its own work over the best that it did in this generation.
        strains: what slows its host down, in words.
        lost_s: seconds that all have waited for it by then.
    """

    host: str
    rank: int
    part: Part
    work_ratio: float
    excess_s: float
    step_s: float
    cost_ratio: float
    since: int
    past_ratio: float
    strains: tuple[str, ...] = ()
    lost_s: float = 0.0


@frozen
class Profile:
    """A slow rank and a healthy one are to be looked at side by side: both do it at about the same steps.

    Attributes:
        number: grows by one with each that is asked for in the generation.
        at: when it was asked for, unix seconds.
        found: who is slow.
        peer: the host whose own work is nearest to the median.
        split: where the time of the slow rank's newest steps went; `peer_split`: of the peer's.
        asked: all that was asked for in this generation so far, as rank and part.
    """

    number: int
    at: float
    found: Straggler
    peer: str
    split: Split
    peer_split: Split
    asked: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, str]:
        """Whose workers are looked at."""
        return self.found.host, self.peer

    def split_of(self, host: str) -> Split:
        """Where the time of the one's steps went, or of the other's."""
        return self.split if host == self.found.host else self.peer_split


@frozen
class WorkerProfiled:
    """A worker was looked at, as far as that could be done.

    Attributes:
        folder: where it is kept, on this host; empty where nothing came of it.
        files: what is kept there, by their names in the folder.
        trouble: what could not be had, and why.
    """

    operation: str
    worker_id: str
    folder: str
    files: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    kind: Literal["worker_profiled"] = "worker_profiled"
