"""What the kernel is asked to do with this process's pages, so that copies from and into them are fast.

Source: madvise(2): MADV_POPULATE_READ, MADV_POPULATE_WRITE (Linux 5.14), MADV_COLLAPSE (6.1). Older kernels refuse, and
nothing is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Callable

Range = tuple[int, int]
"""An address, and how many bytes."""

_HUGEPAGE, _POPULATE_READ, _POPULATE_WRITE, _COLLAPSE = 14, 22, 23, 25
_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_PIECE_BYTES = 16 << 20
"""Asked for at a time: whoever else wants to change this process's mappings waits that long at the most."""
_HUGE_BYTES = 2 << 20
_GAP_BYTES_MAX = 64 << 10
"""What lies between two variables, and is made part of a huge page with them."""
_FAILURES_MAX = 3
"""So many pieces in a row for which there is no memory in one piece: there will be none for the next."""
_CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def populate(address: int, size_bytes: int, go_on: Callable[[], bool]) -> None:
    """Map all pages in, so that the first copy meets no page fault. Other threads run on meanwhile.

    MAP_POPULATE was measured to take several times as long, and the first copy met the faults nevertheless. Where it is
    refused, the first copy maps them in.
    """
    for at, length in _pieces(address, size_bytes):
        if not go_on() or _advise(at, length, _POPULATE_WRITE):
            return


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


def enlarge_file(fd: int, go_on: Callable[[], bool]) -> None:
    """Have a file in memory lie in huge pages, contents unchanged. Other threads run on meanwhile, and may write to it.

    Whoever maps and reads it later was measured to take 0.6 times as long, unmapping included. What of the file is
    empty gets memory here; a huge page of which much is in use at the moment may be left as it is.
    """
    size_bytes = os.fstat(fd).st_size // _HUGE_BYTES * _HUGE_BYTES
    if _are_off() or not size_bytes:
        return
    with _mapped_whole(fd, size_bytes) as address:
        failures = 0
        for at, length in _pieces(address, size_bytes) if address else ():
            if not go_on() or failures == _FAILURES_MAX:
                return
            for huge in range(at, at + length, _HUGE_BYTES):  # one that is all empty is left as it is
                _advise(huge, mmap.PAGESIZE, _POPULATE_READ)
            error = _advise(at, length, _COLLAPSE)
            if error == errno.EINVAL:
                return
            failures = failures + 1 if error in (errno.ENOMEM, errno.EBUSY) else 0


@contextlib.contextmanager
def _mapped_whole(fd: int, size_bytes: int) -> Iterator[int]:
    """The address, that of a huge page, at which a file is mapped to be read; 0 where that is refused."""
    libc, room = _libc(), size_bytes + _HUGE_BYTES
    reserved = libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        yield 0
        return
    try:
        address = -(-reserved // _HUGE_BYTES) * _HUGE_BYTES
        done = libc.mmap(address, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, fd, 0)
        yield 0 if done == _FAILED else address
    finally:
        libc.munmap(reserved, room)


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
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes, libc.mmap.restype = (ctypes.c_void_p, ctypes.c_size_t, *numbers), ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
