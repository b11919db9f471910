"""The parts of a large object: put together, and read by a request where they lie."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from awscrt import checksums

from keepstep.core.values import frozen
from keepstep.ports.store import Chunks

PART_BYTES_MIN = 16 << 20
PARTS_MAX = 10_000


@frozen
class Part:
    number: int
    data: memoryview
    crc: int
    memory: bytearray
    """What `data` lies in."""


class SentBytes:
    """A request's body that is read where it lies; io.BytesIO would copy it."""

    def __init__(self, data: memoryview, pace: Callable[[int], None]) -> None:
        self._data, self._at, self._pace = data, 0, pace

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = None) -> memoryview:
        begin = self._at
        self._at = len(self._data) if size is None or size < 0 else min(len(self._data), begin + size)
        self._pace(self._at - begin)
        return self._data[begin : self._at]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def regroup(body: Chunks, memory: SimpleQueue[bytearray]) -> Iterator[Part]:
    """Deliver a body in parts of one size, the last one apart, as the service wants them.

    Each is put together in what `memory` has free, and waits for it: memory that was written to before costs no time
    to be had. Pieces are summed while they are in the processor's cache.
    """
    part_bytes = max(PART_BYTES_MIN, -(-body.size_bytes // PARTS_MAX))
    number, at, crc, held = 1, 0, 0, bytearray()
    for chunk in body:
        rest = memoryview(chunk)
        while rest:
            if not at:
                held = memory.get()
                if not held:
                    held.extend(bytes(min(part_bytes, body.size_bytes)))
            piece = rest[: part_bytes - at]
            held[at : at + len(piece)] = piece
            crc, at, rest = checksums.crc32c(piece, crc), at + len(piece), rest[len(piece) :]
            if at == part_bytes:
                yield Part(number, memoryview(held)[:at], crc, held)
                number, at, crc = number + 1, 0, 0
    if at:
        yield Part(number, memoryview(held)[:at], crc, held)


def encode_crc(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
