"""Work on many tensors, divided among a few threads: one core does not use all of the memory's speed."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

_THREADS_MAX = 4
"""Two were measured to copy 1.75 times as fast as one."""
SHARE_BYTES = 4 << 20


def beside(work: Callable[[], T]) -> Future[T]:
    """Have something be done in a thread of its own."""
    done: Future[T] = _pool().submit(work)
    return done


def in_shares(shares: Iterable[T], work: Callable[[T], None]) -> None:
    """Call `work` with each share, in this thread and in others.

    The shares are had in this thread, one after the other; others begin with the first while more come. Nobody works on
    any of them any more when this returns, also where it raises.
    """
    waiting: SimpleQueue[T | None] = SimpleQueue()
    others: list[Any] = []
    try:
        for number, share in enumerate(shares):
            waiting.put(share)
            if 0 < number < _threads():
                others.append(_pool().submit(_take_part, waiting, work))
            os.sched_yield()  # whoever has done a share needs the interpreter for a moment to take the next one
        waiting.put(None)
        _take_part(waiting, work)
    finally:
        waiting.put(None)
        for other in others:
            other.exception()
    for other in others:
        other.result()


class Helpers:
    """Other threads that do the same work as this one will."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Have them begin."""
        self._others = [_pool().submit(work) for _ in range(_threads() - 1)]

    @property
    def count(self) -> int:
        return len(self._others)

    def join(self) -> None:
        """Wait until all have done with it; raises what one of them has raised."""
        for other in self._others:
            other.exception()
        for other in self._others:
            other.result()


def shares_of(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Runs of the items, each worth a thread's while.

    Args:
        size_of: bytes of an item.
    """
    share: list[T] = []
    held = 0
    for item in items:
        share.append(item)
        held += size_of(item)
        if held >= SHARE_BYTES:
            yield share
            share, held = [], 0
    if share:
        yield share


def _take_part(waiting: SimpleQueue[Any], work: Callable[[Any], None]) -> None:
    while (share := waiting.get()) is not None:
        work(share)
    waiting.put(None)  # that is for whoever comes next


@functools.lru_cache(maxsize=1)
def _threads() -> int:
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)))


@functools.lru_cache(maxsize=1)
def _pool() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="keepstep-copy")
