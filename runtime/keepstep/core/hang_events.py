"""What sensors report of what a worker is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keepstep.core.stalls import Activity, Stall


@dataclass(frozen=True, slots=True)
class PulseSampled:
    """A worker was looked at: for `silent_s` seconds in which somebody looked it has shown no sign of getting on."""

    operation: str
    worker_id: str
    activity: Activity
    silent_s: float
    kind: Literal["pulse_sampled"] = "pulse_sampled"


@dataclass(frozen=True, slots=True)
class WorkerEvaluates:
    """A worker was seen in an evaluation, or not any more."""

    worker_id: str
    begun: bool
    kind: Literal["worker_evaluates"] = "worker_evaluates"


@dataclass(frozen=True, slots=True)
class StacksCollected:
    """What a worker that stood still was found doing; None where it had gone on by the end of it."""

    operation: str
    worker_id: str
    stall: Stall | None
    kind: Literal["stacks_collected"] = "stacks_collected"
