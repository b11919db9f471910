"""Transfers side by side: as many as there are cores, and more while they wait for their other sides."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar, cast

from keepstep.adapters.clock import monotonic

T = TypeVar("T")

STREAMS_MAX = 8
JUDGED_BYTES = 4 << 20
WAITING_BYTES_PER_S = 110e6
"""A stream that begins slower than this waits for its other side, and so may another one beside it; faster than this,
one more was measured to cost more than it brings, as all of them want the same interpreter."""


def divide(size_bytes: int, range_bytes_min: int, range_bytes_max: int) -> list[tuple[int, int]]:
    """Begin and size of the ranges of an object: one for each stream, within these bounds."""
    length = max(range_bytes_min, min(range_bytes_max, -(-size_bytes // STREAMS_MAX)))
    return [(begin, min(length, size_bytes - begin)) for begin in range(0, size_bytes, length)]


class Streams:
    """Threads for transfers. May be used by several threads."""

    def __init__(self, name: str, cores: int = 1) -> None:
        """Have no thread yet.

        Args:
            cores: how many of them one transfer keeps busy.
        """
        self._pool = ThreadPoolExecutor(STREAMS_MAX, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._width = max(1, min(STREAMS_MAX, len(os.sched_getaffinity(0)) // cores))
        self._turns = threading.Semaphore(self._width)

    def run(self, transfers: Sequence[Callable[[], T]]) -> list[T]:
        """Make all of these transfers, each when it is its turn; what they return, in their order.

        After the first that fails none begins any more, and when this raises none is under way: whoever tries again is
        the only one who writes there.

        Raises:
            Exception: what one of them raised.
        """
        failed = threading.Event()

        def take_turn(transfer: Callable[[], T]) -> T | None:
            with self._turns:
                if failed.is_set():
                    return None
                failed_here = True
                try:
                    made = transfer()
                    failed_here = False
                    return made
                finally:
                    if failed_here:
                        failed.set()

        asked = [self._pool.submit(take_turn, transfer) for transfer in transfers]
        wait(asked)
        return [cast(T, future.result()) for future in asked]

    def pace(self) -> Pace:
        """Watch a transfer that begins now."""
        return Pace(self._widen)

    def close(self) -> None:
        """Let go of the threads; transfers that have not begun are left out."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _widen(self) -> None:
        with self._lock:
            if self._width >= STREAMS_MAX:
                return
            self._width += 1
        self._turns.release()


class Pace:
    """How fast a transfer goes once its first bytes have come: to connect takes its time on the fastest line."""

    def __init__(self, widen: Callable[[], None]) -> None:
        self._widen: Callable[[], None] | None = widen
        self._begun_at = self._bytes = 0.0

    def moved(self, size_bytes: int) -> None:
        """So many bytes more have come."""
        if self._widen is None:
            return
        if not self._begun_at:
            self._begun_at = monotonic()
            return
        self._bytes += size_bytes
        if self._bytes >= JUDGED_BYTES:
            if self._bytes < WAITING_BYTES_PER_S * (monotonic() - self._begun_at):
                self._widen()
            self._widen = None
