"""What the kernel is asked to do with this process's pages, so that copies from and into them are fast.

Source: madvise(2): MADV_DONTNEED, MADV_POPULATE_READ and MADV_POPULATE_WRITE (Linux 5.14), MADV_COLLAPSE (6.1). Older
kernels refuse, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Callable

Range = tuple[int, int]
"""An address, and how many bytes."""

_DONTNEED, _HUGEPAGE, _POPULATE_READ, _POPULATE_WRITE, _COLLAPSE = 4, 14, 22, 23, 25
_SIMPLE = 0
"""PyBUF_SIMPLE: bytes, whatever they are of."""
_PIECE_BYTES = 16 << 20
"""Asked for at a time: whoever else wants to change this process's mappings waits that long at the most."""
_HUGE_BYTES = 2 << 20
_GAP_BYTES_MAX = 64 << 10
"""What lies between two variables, and is made part of a huge page with them."""
_FAILURES_MAX = 3
"""So many pieces in a row for which there is no memory in one piece: there will be none for the next."""
_CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _Buffer(ctypes.Structure):
    """Py_buffer, as far as it matters here."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("owner", ctypes.c_void_p), ("size_bytes", ctypes.c_ssize_t),
        ("rest", ctypes.c_byte * 128),
    )  # fmt: skip


_get_buffer, _release_buffer = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get_buffer.argtypes = ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_Buffer),), None


def populate(address: int, size_bytes: int, go_on: Callable[[], bool]) -> None:
    """Map all pages in, so that the first copy meets no page fault. Other threads run on meanwhile.

    MAP_POPULATE was measured to take several times as long, and the first copy met the faults nevertheless. Where it is
    refused, the first copy maps them in.
    """
    for at, length in _pieces(address, size_bytes):
        if not go_on() or _advise(at, length, _POPULATE_WRITE):
            return


def map_in(address: int, size_bytes: int, go_on: Callable[[], bool]) -> None:
    """Map a file's pages in, so that who reads there meets no page fault. Other threads run on meanwhile.

    Where it is refused, reading maps them in.
    """
    for at, length in _pieces(address, size_bytes):
        if not go_on() or _advise(at, length, _POPULATE_READ):
            return


def map_out(address: int, size_bytes: int) -> None:
    """Map a file's pages out; whoever reads there again has them mapped in again. Other threads run on meanwhile.

    Of memory that is no file's, this would be the end of the contents.
    """
    for at, length in _pieces(address, size_bytes):
        _advise(at, length, _DONTNEED)


def enlarge(ranges: Iterable[Range], go_on: Callable[[], bool]) -> None:
    """Have memory that is in use lie in huge pages, contents and addresses unchanged. Other threads run on meanwhile.

    Nothing is done where the machine is set to have none. Where the kernel can not do it at once, it is told to do it
    when it gets round to it.
    """
    if _are_off():
        return
    failures = 0
    for address, size_bytes in in_huge_pages(ranges):
        for at, length in _pieces(address, size_bytes):
            if not go_on() or failures == _FAILURES_MAX:
                return
            _advise(at, length, _HUGEPAGE)
            failures = failures + 1 if _advise(at, length, _COLLAPSE) in (errno.ENOMEM, errno.EBUSY) else 0


def range_of(memory: Any) -> Range:
    """Where the bytes of a contiguous buffer are, which may be read-only; whoever asks sees to it that they stay there.

    Without NumPy, which a script may want to set up first, and in half the time.

    Raises:
        TypeError, BufferError: it is none.
    """
    buffer = _Buffer()
    _get_buffer(memory, buffer, _SIMPLE)
    _release_buffer(buffer)
    return buffer.address or 0, buffer.size_bytes


def in_huge_pages(ranges: Iterable[Range]) -> Iterator[Range]:
    """The whole huge pages that ranges which lie close together make up, in order."""
    begin = end = 0
    for address, size_bytes in sorted(each for each in ranges if each[1]):
        if address - end > _GAP_BYTES_MAX:
            yield from _whole(begin, end)
            begin = address
        end = max(end, address + size_bytes)
    yield from _whole(begin, end)


def _whole(begin: int, end: int) -> Iterator[Range]:
    first, last = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
    if first < last:
        yield first, last - first


def _pieces(address: int, size_bytes: int) -> Iterator[Range]:
    for offset in range(0, size_bytes, _PIECE_BYTES):
        yield address + offset, min(_PIECE_BYTES, size_bytes - offset)


def _are_off() -> bool:
    try:
        return "[never]" in _CHOICE.read_text()
    except OSError:
        return True


def _advise(address: int, length: int, advice: int) -> int:
    """What kept it from being done; 0 where nothing did."""
    return 0 if _libc().madvise(address, length, advice) == 0 else ctypes.get_errno()


@functools.lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
