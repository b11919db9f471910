"""What sensors report of what a worker is about."""

from __future__ import annotations

from typing import Literal

from keepstep.core.stalls import Activity, Stall
from keepstep.core.values import frozen


@frozen
class PulseSampled:
    """A worker was looked at: for `silent_s` seconds in which somebody looked it has shown no sign of getting on."""

    operation: str
    worker_id: str
    activity: Activity
    silent_s: float
    kind: Literal["pulse_sampled"] = "pulse_sampled"


@frozen
class WorkerEvaluates:
    """A worker was seen in an evaluation, or not any more."""

    worker_id: str
    begun: bool
    kind: Literal["worker_evaluates"] = "worker_evaluates"


@frozen
class WorkerDivides:
    """A worker's script takes its batches from `run.dataset`."""

    worker_id: str
    kind: Literal["worker_divides"] = "worker_divides"


@frozen
class StacksCollected:
    """What a worker that stood still was found doing; None where it had gone on by the end of it.

    `others`: the same of this host's other ranks, where mpirun has started several.
    """

    operation: str
    worker_id: str
    stall: Stall | None
    others: tuple[Stall, ...] = ()
    kind: Literal["stacks_collected"] = "stacks_collected"
