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

from keepstep_worker.profile_writing import Writer, begin, end

Answer = Callable[[dict[str, Any]], None]

_TRIES = 3
"""How often a profile is begun where the process that writes it down dies."""


class Profiler:
    """At most one profile at a time; `number` is the newest that was asked for, `finished` the newest that is over."""

    def __init__(self, number: int, answer: Answer) -> None:
        """Args: number: of the newest profile that was asked of the workers before this one."""
        self.number = self.finished = number
        self._answer = answer
        self._wanted: dict[str, Any] = {}
        self._begun = 0
        self._tries = 0
        self._last_step = 0
        self._until_ns = 0
        self._guard: contextlib.ExitStack | None = None
        self._writer: Writer | None = None

    def take(self, message: dict[str, Any]) -> None:
        """The agent says what it asks for: number, folder, and the most steps and seconds."""
        self._wanted = message

    @property
    def is_told(self) -> bool:
        """Whether it is known what the newest one is to be."""
        return bool(self._wanted.get("number") == self.number)

    def turn(self, step: int) -> None:
        """A step was completed: begin what is wanted, end what has lasted, look after what is being written."""
        if self._writer is not None:
            self._look(step)
        elif self._begun:
            if self._begun != self.number or step >= self._last_step or time.monotonic_ns() >= self._until_ns:
                self.end()
        elif self.is_told:
            self._tries = 0
            self._begin(step)

    def end(self) -> None:
        """End the one that is recorded, if any, and have it written down."""
        if not self._begun or self._writer is not None:
            return
        try:
            self._unguard()
            self._writer = end(_tensorflow())
        except Exception as error:  # of whatever library; it is none of the training's
            self._finish(error)
        else:
            if self._writer is None:
                self._finish()

    def close(self) -> None:
        """The training is over: end the one that is recorded, and wait until it is written down."""
        self.end()
        if self._writer is not None:
            self._finish(self._writer.ended(wait=True))

    def _begin(self, step: int) -> None:
        wanted, self._begun = self._wanted, self.number
        try:
            self._last_step = step + int(wanted["steps"])
            self._until_ns = time.monotonic_ns() + int(float(wanted["seconds"]) * 1e9)
            begin(_tensorflow(), str(wanted["folder"]))
            self._guard = contextlib.ExitStack()
            self._guard.enter_context(_giving_way(_tensorflow().profiler.experimental, self.end))
        except Exception as error:  # of whatever library; it is none of the training's
            self._finish(error)

    def _look(self, step: int) -> None:
        """Whether it is written down; what could not be is recorded again, a few times."""
        assert self._writer is not None
        wrong = self._writer.ended()
        if wrong is None:
            return
        self._tries += 1
        if self._writer.died and self._tries < _TRIES and self._begun == self.number:
            self._writer = None
            self._begin(step)
        else:
            self._finish(wrong)

    def _finish(self, wrong: Exception | str | None = None) -> None:
        number, self._begun, self._writer = self._begun, 0, None
        self.finished = number
        why = f"{type(wrong).__name__}: {wrong}" if isinstance(wrong, Exception) else wrong or ""
        self._answer({"kind": "profiled", "number": number, "error": why[:500]})

    def _unguard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


def _tensorflow() -> Any:
    """TensorFlow; it is not imported for this, since a worker that does without it has nothing to show."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        raise LookupError("the script has not imported TensorFlow")
    return tensorflow


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
