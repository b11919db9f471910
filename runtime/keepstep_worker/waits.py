"""How long a step has waited for its batches: it may take several of them, and compute in between."""

from __future__ import annotations

from collections import deque

_KEPT = 1024


class Waits:
    """The newest waits of one kind, in monotonic nanoseconds."""

    def __init__(self) -> None:
        self._waits: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def add(self, begun_ns: int, ended_ns: int) -> None:
        """Note a wait that is over."""
        self._waits.append((begun_ns, ended_ns))

    def over_ns(self, start_ns: int) -> int:
        """Return when the waiting of the step begun at `start_ns` was over, 0 where it has not waited.

        Of several waits it is when they would have been over one right after the other: what lies between is computing.
        """
        within = []
        for begun_ns, ended_ns in reversed(self._waits):
            if ended_ns <= start_ns:
                break
            within.append((begun_ns, ended_ns))
        if len(within) < 2:
            return within[0][1] if within else 0
        return start_ns + sum(ended_ns - max(begun_ns, start_ns) for begun_ns, ended_ns in within)
