"""Where the time of a rank's steps goes: its data, its own computing, waiting for the others, and the rest."""

from __future__ import annotations

from enum import StrEnum

from keepstep.core.values import evolve, frozen


class Part(StrEnum):
    """A part of a step that is a rank's own: the others wait for it."""

    DATA = "data"
    """From the step's start until the local batch is there."""
    COMPUTE = "compute"
    """From there until the local gradients are ready."""
    REST = "rest"
    """Between two steps: callbacks, logging, what else the script does."""


@frozen
class Split:
    """Mean seconds of the steps of one rank up to and including `step`, parts that are nobody's fault included.

    Attributes:
        step: the newest completed step of them.
        timed: how many steps were measured, of those that there were.
        wait_s: for the others: for their gradients, and for the agreement that all of them have a batch.
        rank: whose steps they are, of a host with ranks that mpirun has started; -1 of one with a single worker.
    """

    step: int
    timed: int
    data_s: float
    compute_s: float
    wait_s: float
    rest_s: float
    rank: int = -1

    @property
    def work_s(self) -> float:
        """What the others have to wait for."""
        return self.data_s + self.compute_s + self.rest_s

    @property
    def step_s(self) -> float:
        """A whole step."""
        return self.work_s + self.wait_s

    def of(self, part: Part) -> float:
        """Seconds of one part."""
        return {Part.DATA: self.data_s, Part.COMPUTE: self.compute_s, Part.REST: self.rest_s}[part]


@frozen
class Window:
    """Steps that are being added up: those behind `begun`, since `begun_at`, unix seconds; `total` is their mean."""

    begun: int
    begun_at: float
    total: Split


TIMED_MIN = 2
"""A window of fewer measured steps says nothing."""


def begin(step: int, now: float, rank: int = -1) -> Window:
    """A window that begins behind `step`."""
    return Window(step, now, Split(step, 0, 0.0, 0.0, 0.0, 0.0, rank))


def added(window: Window, more: Split) -> Window:
    """The window with some more steps in it."""
    old, count = window.total, window.total.timed + more.timed
    if not more.timed:
        return evolve(window, total=evolve(old, step=more.step, rank=more.rank))
    share = more.timed / count

    def mean(before: float, new: float) -> float:
        return round(before + (new - before) * share, 7)

    total = Split(
        more.step,
        count,
        mean(old.data_s, more.data_s),
        mean(old.compute_s, more.compute_s),
        mean(old.wait_s, more.wait_s),
        mean(old.rest_s, more.rest_s),
        more.rank,
    )
    return evolve(window, total=total)


def is_full(window: Window, steps: int, seconds: float, now: float) -> bool:
    """Whether it has as many steps, has lasted as long, and has been measured often enough."""
    long = window.total.step - window.begun >= steps and now - window.begun_at >= seconds
    return long and window.total.timed >= TIMED_MIN
