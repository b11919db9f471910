"""Work on many tensors, divided among a few threads: one core does not use all of the memory's speed."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

T = TypeVar("T")

_THREADS_MAX = 4
"""Two were measured to copy 1.75 times as fast as one."""
_SHARE_BYTES_MIN = 4 << 20


def in_shares(items: Sequence[T], sizes: Sequence[int], work: Callable[[Sequence[T]], None]) -> None:
    """Call `work` with runs of the items of about equally many bytes, each in a thread, the first in this one.

    Nobody works on any of them any more when this returns, also where it raises.

    Args:
        sizes: bytes of each item.
    """
    shares = _divide(items, sizes, _threads())
    others = [_pool().submit(work, share) for share in shares[1:]]
    try:
        work(shares[0])
    finally:
        for other in others:
            other.exception()
    for other in others:
        other.result()


def _divide(items: Sequence[T], sizes: Sequence[int], count: int) -> list[Sequence[T]]:
    share = max(_SHARE_BYTES_MIN, -(-sum(sizes) // count))
    shares, begin, held = [], 0, 0
    for end, size in enumerate(sizes, 1):
        held += size
        if held >= share:
            shares.append(items[begin:end])
            begin, held = end, 0
    return [*shares, items[begin:]] if begin < len(items) or not shares else shares


@functools.lru_cache(maxsize=1)
def _threads() -> int:
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)))


@functools.lru_cache(maxsize=1)
def _pool() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_THREADS_MAX - 1, thread_name_prefix="keepstep-copy")
