"""What ranks computed in a step before they exchanged anything, and a step that is done again on other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from keepstep.core.values import evolve, frozen


@frozen
class Fingerprint:
    """Of a rank's local gradients in one step, bit by bit: `value`, in hexadecimal digits.

    It is empty where the step went by unseen, and where there is none to be had: `why` says so then.
    """

    step: int
    value: str = ""
    why: str = ""


class Doing(NamedTuple):
    """A step that was done once: who did it, in rank order, and the fingerprint of each."""

    hosts: tuple[str, ...]
    values: tuple[str, ...]


def differing(doings: Sequence[Doing]) -> tuple[int, ...]:
    """The ranks whose fingerprints are not all equal."""
    return tuple(rank for rank in range(len(doings[0].hosts)) if len({each.values[rank] for each in doings}) > 1)


def describe(doings: Sequence[Doing]) -> str:
    """What was computed where, of the ranks that differ."""
    found = ((rank, [f"{each.values[rank]} on {each.hosts[rank]}" for each in doings]) for rank in differing(doings))
    return "; ".join(f"rank {rank} {', '.join(values)}" for rank, values in found)


ANY_STEP = 1 << 62


@frozen
class Repeat:
    """How it stands with the step that is done again.

    Attributes:
        at: when a step was last done again, or the run began, unix seconds; 0 where none ever is.
        step: the step that is to be done again; 0 for none.
        doings: how it was done in former generations, each with the ranks on other hosts.
        moved: snapshots of steps up to this one may be of another rank than their host has now, in what is a rank's
            own, so none of them is gone on from; ANY_STEP until it is known which there are.
        named: the host that was found to compute something else than the others.
        why: none is done any more, since it would say nothing; empty where it may.
    """

    at: float = 0.0
    step: int = 0
    doings: tuple[Doing, ...] = ()
    moved: int = 0
    named: str = ""
    why: str = ""

    def given_up(self) -> Repeat:
        """The same, with no step to be done again for now."""
        return evolve(self, step=0, doings=(), named="")


@frozen
class WorkerFingerprinted:
    """A worker has done the step that was to be looked at."""

    worker_id: str
    found: Fingerprint
    kind: Literal["worker_fingerprinted"] = "worker_fingerprinted"
