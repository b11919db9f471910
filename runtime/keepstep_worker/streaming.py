"""Copies of memory that leave the processor's caches to the training, where they were compiled for this machine."""

from __future__ import annotations

import array
import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_FOLDER = Path(__file__).parent / "native"


class Source(NamedTuple):
    """Bytes to copy: where they are, how many, and what keeps them there."""

    address: int
    size_bytes: int
    owner: Any


def copy(target: memoryview, source: Source) -> None:
    """Copy bytes into contiguous memory of their size, while other threads run.

    Raises:
        ValueError: it is of another size.
        TypeError: it is read-only.
    """
    if target.nbytes != source.size_bytes:
        raise ValueError(f"{source.size_bytes} bytes into {target.nbytes}")
    if target.nbytes:
        copy_all([(ctypes.addressof(ctypes.c_char.from_buffer(target)), source)])


def copy_all(blocks: Sequence[tuple[int, Source]]) -> None:
    """Copy each source to its address, while other threads run; nothing is checked."""
    stream = _stream()
    if stream is None:
        for to, source in blocks:
            ctypes.memmove(to, source.address, source.size_bytes)
    else:
        numbers = array.array("Q", [number for to, source in blocks for number in (to, source[0], source[1])])
        stream(numbers.buffer_info()[0], len(blocks))


@functools.lru_cache(maxsize=1)
def _stream() -> Any:
    """The compiled function; None where there is none for this processor."""
    try:
        function = ctypes.CDLL(str(_FOLDER / f"stream-{os.uname().machine}.so")).keepstep_stream
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t), None
    return function
