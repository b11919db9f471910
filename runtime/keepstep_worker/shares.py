"""Work on many tensors, divided among a few threads: one core does not use all of the memory's speed."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

T = TypeVar("T")

_THREADS_MAX = 4
"""Two were measured to copy 1.75 times as fast as one."""
_SHARE_BYTES = 1 << 20


def in_shares(items: Sequence[T], sizes: Sequence[int], work: Callable[[Sequence[T]], None]) -> None:
    """Call `work` with runs of the items, in this thread and in others.

    Nobody works on any of them any more when this returns, also where it raises.

    Args:
        sizes: bytes of each item.
    """
    left = deque(_divide(items, sizes))
    others = [_pool().submit(_take_part, left, work) for _ in range(min(_threads(), len(left)) - 1)]
    try:
        _take_part(left, work)
    finally:
        for other in others:
            other.exception()
    for other in others:
        other.result()


def _take_part(left: deque[Sequence[T]], work: Callable[[Sequence[T]], None]) -> None:
    while True:
        try:
            share = left.popleft()
        except IndexError:  # others have taken the rest
            return
        work(share)


def _divide(items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    shares, begin, held = [], 0, 0
    for end, size in enumerate(sizes, 1):
        held += size
        if held >= _SHARE_BYTES:
            shares.append(items[begin:end])
            begin, held = end, 0
    return [*shares, items[begin:]] if begin < len(items) else shares


@functools.lru_cache(maxsize=1)
def _threads() -> int:
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)))


@functools.lru_cache(maxsize=1)
def _pool() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_THREADS_MAX - 1, thread_name_prefix="keepstep-copy")
