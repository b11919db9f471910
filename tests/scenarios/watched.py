"""The worker on the stage as those see it who look whether it gets on."""

from __future__ import annotations

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.stalls import Activity, Stall
from keepstep.core.state import State


class Watched:
    """A worker that gets on, until it stands still."""

    now: float
    entered: int
    state: State

    def __init__(self) -> None:
        self._doing, self._silent_since = Activity.STEP, None  # type: Activity, float | None
        self._moves_when_looked_at = self.frozen = False

    def stands_still(self, doing: str = "step", entered: str = "") -> None:
        """The worker gives no sign from now on."""
        self._silent_since, self._doing = self.now, Activity(doing)
        self.entered = int(entered or self.entered)

    def goes_on(self) -> None:
        """The worker gets on again."""
        self._silent_since = None

    def goes_on_when_looked_at(self) -> None:
        """It was slow: by the time that its stacks are read, it has moved."""
        self._moves_when_looked_at = True

    def is_frozen(self) -> None:
        """Somebody stops the worker by a signal."""
        self.frozen = True

    def thaw(self) -> bool:
        """Whether it was stopped; the next one is not."""
        frozen, self.frozen = self.frozen, False
        return frozen

    def look(self, action: a.SamplePulse | a.CollectStacks) -> e.Event:
        """What is found."""
        since = self.now if self._silent_since is None else self._silent_since
        if isinstance(action, a.SamplePulse):
            return e.PulseSampled(action.operation, action.worker_id, self._doing, self.now - since)
        stall = None
        if self._silent_since is not None and not self._moves_when_looked_at:
            calls = ("train.py:12 step",)
            stall = Stall(self._doing, since, self.entered, self.state.completed, in_step=True, calls=calls)
        return e.StacksCollected(action.operation, action.worker_id, stall)
