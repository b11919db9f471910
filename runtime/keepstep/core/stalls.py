"""What a worker is about, and what one that does not get on was found doing."""

from __future__ import annotations

from enum import StrEnum

from keepstep.core.values import frozen


class Activity(StrEnum):
    """What a worker is about, as far as it says; each has a time of its own within which it is to get on."""

    START = "start"
    """Its script has not come to its training yet."""
    FIRST_STEP = "first_step"
    """Restoring, tracing, and the first step."""
    STEP = "step"
    EPOCH = "epoch"
    """The first step of an epoch, whose data have to be made ready."""
    PAUSE = "pause"
    """Between two steps: callbacks, and the checkpoints of the script."""
    EVALUATION = "evaluation"
    FINISHED = "finished"
    """The last step is done."""


@frozen
class Stall:
    """A worker that shows no sign of getting on, and what it was found doing.

    Attributes:
        since: unix seconds of its last sign.
        process: its state as proc(5) has it: R, S, D, T, t.
        in_step: its main thread is inside TensorFlow, and so may wait for others.
        spins: it uses a processor all the time.
        calls: where in the script its threads are, innermost calls, at most a handful.
        joined: its script reports steps.
        ready: its gradients of the step that it is in are ready; None where that is not measured.
        rank: which one of a host with several; -1 where it is the host's only one.
    """

    activity: Activity
    since: float
    entered: int = 0
    completed: int = 0
    process: str = "S"
    in_step: bool = False
    spins: bool = False
    calls: tuple[str, ...] = ()
    joined: bool = True
    ready: bool | None = None
    rank: int = -1
