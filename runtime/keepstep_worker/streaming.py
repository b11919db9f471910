"""Copies of memory that leave the processor's caches to the training, where they were compiled for this machine."""

from __future__ import annotations

import array
import bisect
import ctypes
import functools
import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keepstep_worker.pages import Range, range_of
from keepstep_worker.shares import SHARE_BYTES, Helpers, in_shares, shares_of

_FOLDER = Path(__file__).parent / "native"
_CPU = Path("/proc/cpuinfo")
_PIECE_BYTES = 1 << 20
_PIECE = struct.Struct("QQQ")
_NONE_LEFT = 2**64 - 1
_IN_FOURS, _STRAIGHT, _BY_WHOLE_LINES = range(3)
"""As in stream.c."""
_LET_GO = 32
"""So many sources can be let go of while another thread copies a piece."""


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

    _fields_ = (
        ("taken", ctypes.c_uint64), ("given", ctypes.c_uint64), ("closed", ctypes.c_uint64), ("left", ctypes.c_uint64),
        ("threads", ctypes.c_uint64), ("at", ctypes.c_uint64 * 8),
    )  # fmt: skip


class _Python(ctypes.Structure):
    """As in stream.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("item", "get", "release", "clear"))


_PYTHON = _Python(*(
    ctypes.cast(function, ctypes.c_void_p) for function in (
        ctypes.pythonapi.PyList_GetItem, ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release,
        ctypes.pythonapi.PyErr_Clear,
    )
))  # fmt: skip


class Copying:
    """Copies bytes while more are given, by several threads; all are where they belong when the context is left.

    No thread needs the interpreter between two pieces: to wait for it was measured to take a fifth of the whole.

    Attributes:
        left_bytes: of those that were given last, how many are where they belong only once `finish` was called.
    """

    def __init__(self, pieces: int, alone: bool = False) -> None:
        """Begin without any.

        Args:
            pieces: how many (`pieces_in`) the sources make at the most that will be given.
            alone: all in this thread, as the context is left.
        """
        self._stream, self._alone = _stream(), alone
        self._pieces = array.array("Q", bytes(_PIECE.size * pieces))
        self._board = _Board(left=_NONE_LEFT)
        self._owners: list[Any] = []
        self._firsts = array.array("Q")
        self._size_bytes = self.left_bytes = 0
        self._helpers: Helpers | None = None

    @property
    def threads(self) -> int:
        """How many copy what is left, where one calls `finish`."""
        return 1 + (self._helpers.count if self._helpers is not None else 0)

    @property
    def ranges(self) -> list[Range]:
        """Where the sources lie, in pieces."""
        return [(address, size) for _, address, size in self._given(0, self._board.given)]

    def give(self, to: int, source: Source) -> None:
        """Have a source copied to an address; nothing is checked."""
        address, size, owner = source
        self._owners.append(owner)  # which keeps its bytes there
        pieces, count = self._pieces, self._board.given
        self._firsts.append(count)
        for at in range(0, size, _PIECE_BYTES):
            _PIECE.pack_into(pieces, _PIECE.size * count, to + at, address + at, min(_PIECE_BYTES, size - at))
            count += 1
        self._board.given = count
        self._was_given(size)

    def give_each(self, ranges: Sequence[Range], objects: list[Any]) -> int:
        """Have the bytes of objects copied to ranges, one of its size for each object; the rest is not checked.

        Args:
            objects: they tell where their bytes are (the buffer protocol), and keep them there while they are held.

        Returns:
            Up to which one that was done: all, or the first that does not tell, or has another size.
        """
        give = _give()
        if give is None:
            return self._give_some(ranges, objects)
        count, places = len(objects), array.array("Q", itertools.chain.from_iterable(ranges))
        firsts = array.array("Q", bytes(8 * count))
        at = [each.buffer_info()[0] for each in (places, firsts, self._pieces)]
        done: int = give(objects, count, *at, ctypes.byref(self._board), ctypes.byref(_PYTHON), _PIECE_BYTES)
        self._owners += objects if done == count else objects[:done]
        self._firsts += firsts[:done]
        self._was_given(sum(places[1 : 2 * done : 2]))
        return done

    def _give_some(self, ranges: Sequence[Range], objects: Sequence[Any]) -> int:
        for done, ((to, size), each) in enumerate(zip(ranges, objects)):
            try:
                address, size_bytes = range_of(each)
            except (TypeError, ValueError, BufferError):
                return done
            if size_bytes != size:
                return done
            self.give(to, Source(address, size, each))
        return len(objects)

    def _was_given(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        if self._helpers is None and self._size_bytes >= SHARE_BYTES and not self._alone and self._stream is not None:
            self._helpers = Helpers(self._work)

    def leave(self, size_bytes: int) -> None:
        """Have the last of what was given, about so many bytes in whole sources, be copied behind the context.

        Other threads go on with it; its owners are to keep its bytes as they are until `finish` has returned.
        """
        count = self._board.given
        first = count - count * size_bytes // max(1, self._size_bytes)
        source = bisect.bisect_left(self._firsts, first)
        self._board.left = self._firsts[source] if source < len(self._firsts) else count
        self.left_bytes = sum(self._pieces[3 * self._board.left + 2 : 3 * count : 3])

    def let_go(self) -> None:
        """Let go of those sources that are where they belong, when the context was left."""
        self._let_go(self._board.left)

    def _let_go(self, piece: int) -> None:
        """Let go of the sources that have no piece from this one on; all before it are where they belong."""
        count = len(self._firsts) if piece >= self._board.given else bisect.bisect(self._firsts, piece) - 1
        del self._owners[:count], self._firsts[:count]

    def finish(self) -> None:
        """Have all of what was left be where it belongs: take part in copying it, and let go of it. In any thread."""
        if self._stream is not None:
            self._work()
        else:
            _move(self._given(self._board.left, self._board.given))
        if self._helpers is not None:
            self._helpers.join()
        self._owners.clear()

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._board.closed = 1
        try:
            if kind is None:
                self._copy()
        finally:
            if self._helpers is not None and (kind is not None or not self.left_bytes):
                self._helpers.join()

    def _copy(self) -> None:
        """Copy all but what is left."""
        if self._stream is not None:
            if self._helpers is not None:
                self._copy_most()
            self._work(stays=not self.left_bytes)
            return
        pieces = self._given(0, min(self._board.left, self._board.given))
        if self._alone:
            _move(pieces)
        else:
            in_shares(shares_of(pieces, lambda piece: piece[2]), _move)

    def _copy_most(self) -> None:
        """Copy so much that others copy the rest while this thread lets go of what that was.

        They take all of the memory's speed or nearly, so that this costs less than it does behind the copy.
        """
        left, most = self._board.left, min(self._board.left, self._board.given) - len(self._owners) // _LET_GO
        if most > 0:
            self._board.left = most
            self._work(stays=False)
            self._let_go(most)
            self._board.left = left

    def _given(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Of each piece where it goes, where it is, and its bytes."""
        pieces = self._pieces[3 * first : 3 * end]
        return zip(pieces[::3], pieces[1::3], pieces[2::3])

    def _work(self, stays: bool = True) -> None:
        self._stream(self._pieces.buffer_info()[0], ctypes.byref(self._board), _way(), stays)


def pieces_in(sizes: Iterable[int]) -> int:
    """How many pieces sources of so many bytes are copied in."""
    return sum(-(-size // _PIECE_BYTES) for size in sizes)


def copy(target: memoryview, source: Source) -> None:
    """Copy bytes into contiguous memory of their size, while other threads run.

    Raises:
        ValueError: it is of another size.
        TypeError: it is read-only.
    """
    if target.nbytes != source.size_bytes:
        raise ValueError(f"{source.size_bytes} bytes into {target.nbytes}")
    if target.nbytes:
        with Copying(pieces_in([target.nbytes]), alone=True) as copying:
            copying.give(ctypes.addressof(ctypes.c_char.from_buffer(target)), source)


def _move(pieces: Iterable[tuple[int, int, int]]) -> None:
    for to, address, size_bytes in pieces:
        ctypes.memmove(to, address, size_bytes)


@functools.lru_cache(maxsize=1)
def _stream() -> Any:
    """The compiled function that copies; None where there is none for this processor."""
    return _compiled(ctypes.CDLL, "keepstep_copy_in_a_way", None, 2 * [ctypes.c_void_p] + 2 * [ctypes.c_int])


@functools.lru_cache(maxsize=1)
def _give() -> Any:
    """The compiled function that gives what objects hold; None where there is none for this processor."""
    arguments = [ctypes.py_object, ctypes.c_uint64, *4 * [ctypes.c_void_p], ctypes.POINTER(_Python), ctypes.c_uint64]
    return _compiled(ctypes.PyDLL, "keepstep_give", ctypes.c_uint64, arguments)


def _compiled(kind: type[ctypes.CDLL], name: str, result: Any, arguments: Sequence[Any]) -> Any:
    try:
        function = getattr(kind(str(_FOLDER / f"stream-{os.uname().machine}.so")), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = arguments, result
    return function


@functools.lru_cache(maxsize=1)
def _way() -> int:
    """How this processor copies the fastest (native/stream.c has the figures)."""
    try:
        known = _CPU.read_bytes().split()
    except OSError:
        return _IN_FOURS
    if b"AuthenticAMD" not in known:
        return _IN_FOURS
    return _BY_WHOLE_LINES if b"avx512f" in known else _STRAIGHT
