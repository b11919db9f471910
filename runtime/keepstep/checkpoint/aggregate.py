"""A local state for a rank that the checkpoint's world did not have, made of those of all its ranks.

Floating-point tensors (statistics of BatchNorm, metrics) become the mean over the ranks; what has no mean (integers,
byte blobs, random state; floats of 8 bits) is rank 0's. The worker is told by the slab's metadata that its local state
is nobody's own, and in which of the tensors without a mean the ranks differed: random streams that were apart must not
become one, those that all ranks shared must stay one.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.manifest import StoredObject
from keepstep.checkpoint.safetensors import (
    MalformedSlab,
    StoredTensor,
    add_metadata,
    parse_head_bytes,
    parse_layout,
    parse_tensors,
)
from keepstep.core.values import frozen
from keepstep.ports.store import ObjectStore

AGGREGATED, DIFFERS = "aggregated", "differs"
"""Keys of the metadata: over how many ranks; a JSON list of the tensors without a mean in which they differed."""
STREAMS = 4
MEMORY_BYTES = 64 << 20
"""What is read ahead of all ranks' objects together, down to a floor for each."""
_WINDOW_BYTES_MIN, _WINDOW_BYTES_MAX = 256 << 10, 4 << 20
_STEP_BYTES = 1 << 20


class CorruptObject(Exception):
    """An object is not what the manifest says; the message begins with its key."""


class Aggregation:
    """Reads the local objects of all ranks side by side, each byte once, and checks every one of them.

    Attributes:
        head_bytes: length of the new slab's head.
        local_bytes: length of its local region.
    """

    def __init__(self, store: ObjectStore, objects: Sequence[StoredObject]) -> None:
        """Read the heads.

        Raises:
            CorruptObject: an object begins with no head, or is shorter than its head says.
            StoreError: the store's own.
        """
        window = min(max(MEMORY_BYTES // len(objects), _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX)
        self._sources = [_Source(store, stored, window) for stored in objects]
        with ThreadPoolExecutor(STREAMS, thread_name_prefix="aggregate") as streams:
            tables = list(streams.map(_read_table, self._sources))
        self._first, self._others = tables[0], tables[1:]
        without_mean = [tensor.key for tensor in self._first.tensors.values() if tensor.dtype not in _ITEMS]
        self.head_bytes = len(self._head(without_mean + [key for key in self._first.tensors if not self._alike(key)]))
        self.local_bytes = self._first.local_bytes
        self._differs: list[str] = []

    def pieces(self) -> Iterator[bytes]:
        """Deliver the local region, in order.

        Raises:
            CorruptObject: an object differs from what the manifest says in size or CRC.
            StoreError: the store's own.
        """
        for tensor in self._first.tensors.values():
            if tensor.dtype in _ITEMS and self._alike(tensor.key):
                yield from self._mean(tensor)
            else:
                yield from self._of_rank_0(tensor)
        for source in self._sources:
            source.finish()

    def head(self) -> bytes:
        """The new slab's head, of `head_bytes` bytes, once all pieces were delivered."""
        head = self._head(self._differs)
        text = head[8:].ljust(self.head_bytes - 8)
        return len(text).to_bytes(8, "little") + text

    def _head(self, differs: list[str]) -> bytes:
        entries = {AGGREGATED: str(len(self._sources)), DIFFERS: json.dumps(differs, separators=(",", ":"))}
        return add_metadata(self._first.head, entries)

    def _alike(self, key: str) -> bool:
        """Whether all ranks have such a tensor."""
        mine = self._first.tensors[key]
        theirs = (table.tensors.get(key) for table in self._others)
        return all(each is not None and (each.dtype, each.shape) == (mine.dtype, mine.shape) for each in theirs)

    def _mean(self, tensor: StoredTensor) -> Iterator[bytes]:
        for at, size in _steps(tensor):
            yield _mean_of(tensor.dtype, (table.read(tensor.key, at, size) for table in (self._first, *self._others)))

    def _of_rank_0(self, tensor: StoredTensor) -> Iterator[bytes]:
        alike = self._alike(tensor.key)
        differs = not alike
        for at, size in _steps(tensor):
            piece = self._first.read(tensor.key, at, size)
            differs = differs or any(table.read(tensor.key, at, size) != piece for table in self._others)
            yield piece
        if differs:
            self._differs.append(tensor.key)


def _steps(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    size = tensor.stop - tensor.start
    return ((at, min(_STEP_BYTES, size - at)) for at in range(0, size, _STEP_BYTES))


# --- one rank's object -----------------------------------------------------------------------------------------------


class _Source:
    """An object read mostly forward, a window at a time, with its CRC kept on the way."""

    def __init__(self, store: ObjectStore, stored: StoredObject, window_bytes: int) -> None:
        self._store, self.stored, self._window_bytes = store, stored, window_bytes
        self._window, self._at, self._crc = b"", 0, 0

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from `start`; what lies before them is passed over for good."""
        if start < self._at:  # in another place than at rank 0
            return self._get(start, size)
        taken = bytearray()
        while len(taken) < size:
            begin = start + len(taken) - self._at
            if begin >= len(self._window):
                self._advance()
            else:
                taken += self._window[begin : begin + size - len(taken)]
        return bytes(taken)

    def finish(self) -> None:
        """Read what is left; then the whole object was seen."""
        while self._at + len(self._window) < self.stored.size_bytes:
            self._advance()
        if f"{self._crc:08x}" != self.stored.crc32c:
            raise CorruptObject(f"{self.stored.key}: CRC32C {self._crc:08x}, the manifest says {self.stored.crc32c}")

    def _advance(self) -> None:
        end, whole = self._at + len(self._window), self.stored.size_bytes
        if end >= whole:
            raise CorruptObject(f"{self.stored.key}: its head wants more than its {whole} bytes")
        self._window, self._at = self._get(end, min(self._window_bytes, whole - end)), end
        self._crc = crc32c(self._window, self._crc)

    def _get(self, start: int, size: int) -> bytes:
        whole = self.stored.size_bytes
        more = 1 if start + size == whole else 0  # shows an object that is too long
        got = b"".join(self._store.get(self.stored.key, start, size + more))
        if len(got) > size:
            raise CorruptObject(f"{self.stored.key}: longer than the {whole} bytes of the manifest")
        if len(got) < size:
            raise CorruptObject(f"{self.stored.key}: {start + len(got)} bytes, the manifest says {whole}")
        return got


@frozen
class _Table:
    """Where the local tensors lie in one rank's object: behind the head, as if there were no replicated ones."""

    source: _Source
    head: bytes
    replicated_bytes: int
    local_bytes: int
    tensors: dict[str, StoredTensor]

    def read(self, key: str, at: int, size: int) -> bytes:
        start = self.tensors[key].start - self.replicated_bytes + len(self.head)
        return self.source.read(start + at, size)


def _read_table(source: _Source) -> _Table:
    try:
        head = source.read(0, parse_head_bytes(source.read(0, 8)))
        layout, tensors = parse_layout(head), parse_tensors(head)
    except MalformedSlab as error:
        raise CorruptObject(f"{source.stored.key}: {error}") from error
    if layout.head_bytes + layout.local_bytes != source.stored.size_bytes:
        wanted = layout.head_bytes + layout.local_bytes
        raise CorruptObject(
            f"{source.stored.key}: {source.stored.size_bytes} bytes, the tensors end at byte {wanted} of it"
        )
    local = {tensor.key: tensor for tensor in tensors if tensor.is_local}
    return _Table(source, head, layout.replicated_bytes, layout.local_bytes, local)


# --- the mean --------------------------------------------------------------------------------------------------------


def _mean_of(dtype: str, pieces: Iterable[bytes]) -> bytes:
    """Mean of arrays of equal length, in double precision, rounded once; where all are equal it is that, exactly."""
    unpack, pack = _ITEMS[dtype]
    combine = _move_mean if dtype == "F64" else _add
    first, values, count = b"", None, 0
    for count, piece in enumerate(pieces, 1):
        if count == 1:
            first = piece
        elif values is not None or piece != first:
            before = unpack(first) if values is None else values
            if values is None and combine is _add:
                before = [value * (count - 1) for value in before]
            values = combine(before, unpack(piece), count)
    if values is None:
        return first
    return pack(values if dtype == "F64" else [value / count for value in values])


def _add(sums: Sequence[float], values: Sequence[float], count: int) -> list[float]:
    """Sums of what is narrower than a double, which are exact for equal values; the faster way by far."""
    return list(map(operator.add, sums, values))


def _move_mean(means: Sequence[float], values: Sequence[float], count: int) -> list[float]:
    """The means of `count` doubles from those of one less: no sum can overflow, and equal ones stay as they are."""
    return [m if m == x else m + (x / count - m / count) for m, x in zip(means, values, strict=True)]


def _struct(code: str, size_bytes: int) -> tuple[Callable[[bytes], Sequence[float]], Callable[[list[float]], bytes]]:
    def unpack(data: bytes) -> Sequence[float]:
        return struct.unpack(f"<{len(data) // size_bytes}{code}", data)

    def pack(values: list[float]) -> bytes:
        return struct.pack(f"<{len(values)}{code}", *values)

    return unpack, pack


def _unpack_bfloat16(data: bytes) -> Sequence[float]:
    wide = bytearray(2 * len(data))  # the upper half of a float32
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return struct.unpack(f"<{len(data) // 2}f", wide)


def _pack_bfloat16(values: list[float]) -> bytes:
    words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    rounded = [(w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words]  # to nearest, ties to even
    return struct.pack(
        f"<{len(values)}H", *(0x7FC0 if math.isnan(value) else r for value, r in zip(values, rounded, strict=True))
    )


_ITEMS: dict[str, tuple[Callable[[bytes], Sequence[float]], Callable[[list[float]], bytes]]] = {
    "F64": _struct("d", 8),
    "F32": _struct("f", 4),
    "F16": _struct("e", 2),
    "BF16": (_unpack_bfloat16, _pack_bfloat16),
    "C64": _struct("f", 4),  # a complex number's mean is that of its two parts
}
"""The types that have a mean: their bytes to numbers, and back."""
