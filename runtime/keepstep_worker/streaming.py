"""Copies of memory that leave the processor's caches to the training, where they were compiled for this machine."""

from __future__ import annotations

import array
import ctypes
import functools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from keepstep_worker.pages import Range
from keepstep_worker.shares import SHARE_BYTES, Helpers, in_shares, shares_of

_FOLDER = Path(__file__).parent / "native"
_CPU = Path("/proc/cpuinfo")
_PIECE_BYTES = 1 << 20
_PIECE = struct.Struct("QQQ")


class Source(NamedTuple):
    """Bytes to copy: where they are, how many, and what keeps them there."""

    address: int
    size_bytes: int
    owner: Any


def source_of(raw: Any) -> Source:
    """Return where the bytes of a contiguous buffer are, which may be read-only.

    Raises:
        TypeError, ValueError, BufferError: it is none, or no memoryview and empty.
    """
    import numpy

    if isinstance(raw, memoryview) and not raw.nbytes:
        return Source(0, 0, raw)
    owner = numpy.frombuffer(raw, "uint8")
    return Source(owner.__array_interface__["data"][0], owner.nbytes, owner)


class _Board(ctypes.Structure):
    """As in stream.c. A processor of this kind lets other threads see what is stored in the order of the stores."""

    _fields_ = (("taken", ctypes.c_uint64), ("given", ctypes.c_uint64), ("closed", ctypes.c_uint64))


class Copying:
    """Copies bytes while more are given, by several threads; all are where they belong when the context is left.

    No thread needs the interpreter between two pieces: to wait for it was measured to take a fifth of the whole.
    """

    def __init__(self, sizes: Iterable[int], alone: bool = False) -> None:
        """Begin without any.

        Args:
            sizes: bytes of all sources that will be given, in any order.
            alone: all in this thread, as the context is left.
        """
        self._stream, self._alone = _stream(), alone
        self._pieces = array.array("Q", bytes(_PIECE.size * sum(-(-size // _PIECE_BYTES) for size in sizes)))
        self._board = _Board()
        self._owners: list[Any] = []
        self._size_bytes = 0
        self._helpers: Helpers | None = None

    @property
    def ranges(self) -> list[Range]:
        """Where the sources lie, in pieces."""
        return [(address, size) for _, address, size in self._given()]

    def give(self, to: int, source: Source) -> None:
        """Have a source copied to an address; nothing is checked."""
        address, size, owner = source
        self._owners.append(owner)  # which keeps its bytes there
        pieces, count = self._pieces, self._board.given
        for at in range(0, size, _PIECE_BYTES):
            _PIECE.pack_into(pieces, _PIECE.size * count, to + at, address + at, min(_PIECE_BYTES, size - at))
            count += 1
        self._board.given = count
        self._size_bytes += size
        if self._helpers is None and self._size_bytes >= SHARE_BYTES and not self._alone and self._stream is not None:
            self._helpers = Helpers(self._work)

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._board.closed = 1
        try:
            if kind is None:
                self._finish()
        finally:
            if self._helpers is not None:
                self._helpers.join()

    def _finish(self) -> None:
        if self._stream is not None:
            self._work()
        elif self._alone:
            _move(self._given())
        else:
            in_shares(shares_of(self._given(), lambda piece: piece[2]), _move)

    def _given(self) -> Iterator[tuple[int, int, int]]:
        """Of each piece where it goes, where it is, and its bytes."""
        pieces = self._pieces[: 3 * self._board.given]
        return zip(pieces[::3], pieces[1::3], pieces[2::3])

    def _work(self) -> None:
        self._stream(self._pieces.buffer_info()[0], ctypes.byref(self._board), _goes_straight())


def copy(target: memoryview, source: Source) -> None:
    """Copy bytes into contiguous memory of their size, while other threads run.

    Raises:
        ValueError: it is of another size.
        TypeError: it is read-only.
    """
    if target.nbytes != source.size_bytes:
        raise ValueError(f"{source.size_bytes} bytes into {target.nbytes}")
    if target.nbytes:
        with Copying([target.nbytes], alone=True) as copying:
            copying.give(ctypes.addressof(ctypes.c_char.from_buffer(target)), source)


def _move(pieces: Iterable[tuple[int, int, int]]) -> None:
    for to, address, size_bytes in pieces:
        ctypes.memmove(to, address, size_bytes)


@functools.lru_cache(maxsize=1)
def _stream() -> Any:
    """The compiled function; None where there is none for this processor."""
    try:
        function = ctypes.CDLL(str(_FOLDER / f"stream-{os.uname().machine}.so")).keepstep_copy_in_order
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int), None
    return function


@functools.lru_cache(maxsize=1)
def _goes_straight() -> bool:
    """Whether this processor copies a page after the other the fastest (native/stream.c has the figures)."""
    try:
        return b"AuthenticAMD" in _CPU.read_bytes()
    except OSError:
        return False
