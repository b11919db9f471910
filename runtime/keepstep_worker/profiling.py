"""TensorFlow's profile of some steps of this worker, begun and ended between two of them when the agent asks for it.

The orders, which are read in each step anyway, say that there is something to be asked; a message says what. Nothing of
it may end the training: what goes wrong is told to the agent.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[dict[str, Any]], None]


class Profiler:
    """At most one profile at a time; `number` is the newest that was asked for, `finished` the newest that is over."""

    def __init__(self, number: int, answer: Answer) -> None:
        """Args: number: of the newest profile that was asked of the workers before this one."""
        self.number = self.finished = number
        self._answer = answer
        self._wanted: dict[str, Any] = {}
        self._begun = 0
        self._last_step = 0
        self._until_ns = 0
        self._guard: contextlib.ExitStack | None = None

    def take(self, message: dict[str, Any]) -> None:
        """The agent says what it asks for: number, folder, and the most steps and seconds."""
        self._wanted = message

    @property
    def is_told(self) -> bool:
        """Whether it is known what the newest one is to be."""
        return bool(self._wanted.get("number") == self.number)

    def turn(self, step: int) -> None:
        """A step was completed: begin what is wanted, end what has lasted."""
        if self._begun:
            if self._begun != self.number or step >= self._last_step or time.monotonic_ns() >= self._until_ns:
                self.end()
        elif self.is_told:
            self._begin(step)

    def end(self) -> None:
        """End the one that runs, if any, and write it down."""
        if not self._begun:
            return
        begun, self._begun = self._begun, 0
        self.finished = begun
        try:
            self._unguard()
            _profiler().stop()
        except Exception as error:  # of whatever library; it is none of the training's
            self._tell(begun, error)
        else:
            self._tell(begun)

    def _begin(self, step: int) -> None:
        number, wanted = self.number, self._wanted
        try:
            profiler, folder = _profiler(), str(wanted["folder"])
            self._last_step = step + int(wanted["steps"])
            self._until_ns = time.monotonic_ns() + int(float(wanted["seconds"]) * 1e9)
            profiler.start(folder)
            self._begun = number
            self._guard = contextlib.ExitStack()
            self._guard.enter_context(_giving_way(profiler, self.end))
        except Exception as error:  # of whatever library; it is none of the training's
            self._begun, self.finished = 0, number
            self._tell(number, error)

    def _unguard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def _tell(self, number: int, error: Exception | None = None) -> None:
        why = "" if error is None else f"{type(error).__name__}: {error}"[:500]
        self._answer({"kind": "profiled", "number": number, "error": why})


def _profiler() -> Any:
    """TensorFlow's profiler; it is not imported for this, since a worker that does without it has nothing to show."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        raise LookupError("the script has not imported TensorFlow")
    return tensorflow.profiler.experimental


@contextlib.contextmanager
def _giving_way(profiler: Any, end: Callable[[], None]) -> Iterator[None]:
    """While this lasts, a script that begins a profile of its own ends this one, where TensorFlow would raise."""
    original = profiler.start

    def start(*args: Any, **keywords: Any) -> Any:
        end()
        return original(*args, **keywords)

    profiler.start = start
    try:
        yield
    finally:
        if profiler.start is start:
            profiler.start = original
