"""A limit on how fast bytes are sent, over all threads that send."""

from __future__ import annotations

import threading
from collections.abc import Callable

BURST_S = 0.05
"""As much as the line carries in so long may go out at once: pauses are no shorter than what a scheduler can keep."""


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Throttle:
    """Keeps whoever asks waiting until the line is free for it again."""

    def __init__(
        self, bytes_per_s: float, monotonic: Callable[[], float], pause: Callable[[float], None] = _pause
    ) -> None:
        """Nothing was sent yet.

        Args:
            bytes_per_s: the limit.
            monotonic: seconds of a clock that never goes back.
            pause: waits for so many seconds.
        """
        self._bytes_per_s, self._monotonic, self._pause = bytes_per_s, monotonic, pause
        self._lock = threading.Lock()
        self._free_at = monotonic()

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        with self._lock:
            now = self._monotonic()
            wait_s = max(self._free_at - now, 0.0)
            self._free_at = now + wait_s + size_bytes / self._bytes_per_s
        if wait_s > BURST_S:
            self._pause(wait_s)
