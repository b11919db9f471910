"""Virtual time: a heap of callbacks. Equal times run in the order in which they were asked for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clockwork:
    """The only clock of a simulation; seconds from 1,000,000 on, so that no code can mistake 0 for "never"."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Run `what` after `delay_s`."""
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), next(self._order), what))

    def run_until(self, end: float, done: Callable[[], bool]) -> None:
        """Let time pass until `end`, until `done()`, or until nothing is left to happen."""
        while self._heap and self._heap[0][0] <= end and not done():
            at, _, what = heapq.heappop(self._heap)
            self.now = at
            what()
