"""Records of TFRecord files by number, so that they can be had in any order.

A file is a sequence of: length (8 bytes), its checksum (4), the data, their checksum (4). Source: TensorFlow's
tensorflow/core/lib/io/record_writer.h. The checksums (masked CRC32C) are not looked at: Python has none of that kind.
"""

from __future__ import annotations

import array
import bisect
import mmap
import os
import struct
from collections.abc import Iterable
from typing import Any

_HEAD = struct.Struct("<QI")
_TAIL_BYTES = 4


class TfRecords:
    """The records of uncompressed TFRecord files, in the order of the files; several threads may read.

    To be loaded by what parses one: `run.dataset(Loaded(TfRecords(paths), parse), global_batch=...)`.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Find where each record begins, by the lengths before them. No file is kept open.

        Raises:
            OSError: a file can not be read.
            ValueError: a file ends within a record, or is none of this kind; it and the place are named.
        """
        self._paths = [os.fspath(path) for path in paths]
        self._begins = [_begins(path) for path in self._paths]
        self._ends: list[int] = []
        for begins in self._begins:
            self._ends.append(len(begins) - 1 + (self._ends[-1] if self._ends else 0))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> bytes:
        """Return a record.

        Raises:
            IndexError: there are not as many.
            ValueError: the file has become shorter.
        """
        at = number + len(self) if number < 0 else number
        if not 0 <= at < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        file = bisect.bisect_right(self._ends, at)
        place = at - (self._ends[file - 1] if file else 0)
        begin, after = self._begins[file][place : place + 2]
        size = after - begin - _HEAD.size - _TAIL_BYTES
        with open(self._paths[file], "rb", buffering=0) as opened:
            opened.seek(begin + _HEAD.size)
            data = opened.read(size)
        if len(data) != size:
            raise ValueError(f"{self._paths[file]}: record at byte {begin} has {len(data)} bytes left of {size}")
        return data


def _begins(path: str) -> Any:
    """The byte at which each record begins, and the file's end."""
    found = array.array("Q", [0])
    with open(path, "rb") as file:
        whole = os.fstat(file.fileno()).st_size
        if not whole:
            return found
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
            at = 0
            while at < whole:
                size = _HEAD.unpack_from(held, at)[0] if at + _HEAD.size <= whole else whole
                begin, at = at, at + _HEAD.size + size + _TAIL_BYTES
                if at > whole:
                    raise ValueError(
                        f"{path}: at byte {begin} there is no whole record; wanted an uncompressed TFRecord file"
                    )
                found.append(at)
    return found
