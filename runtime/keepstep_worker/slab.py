"""The slab: a memfd which, sealed, is a valid safetensors file, byte for byte.

What lives here: the layout (which tensor lies where) and the writing of a slab, without NumPy.
That a slab is sealed, and for which step, is said on the wire and not in the slab. Replicated tensors (keys under
`replicated/`) come first, so that they are one range of bytes; those local to a rank (`local/`) follow.

Source: the safetensors format, README of huggingface/safetensors: 8 bytes header length (little-endian), a JSON header
that may be padded with spaces, then the tensors without holes or trailing bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import operator
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

from keepstep_worker import pages
from keepstep_worker.shares import SHARE_BYTES, in_shares, shares_of
from keepstep_worker.streaming import Copying, Source, pieces_in

REPLICATED = "replicated/"
LOCAL = "local/"
FORMAT = "keepstep-slab"
FORMAT_VERSION = "1"

ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
DTYPES: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""Names of NumPy and TensorFlow to those of safetensors; what is not here is stored as raw bytes (U8)."""

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100_000_000  # the limit of safetensors' own reader


class SlabError(Exception):
    """The bytes are no slab, or a tensor can not be stored in one."""


Write = Callable[[memoryview], None]


class Reader(NamedTuple):
    """How the bytes of many things are had together, in a fraction of the time that one after the other takes.

    Attributes:
        read: values of the things, in order, some at a time: each has the bytes that its thing has now, until something
            changes it. Of the first things before it asks for the last.
        bytes_of: the bytes of such a value, where it does not show them itself (the buffer protocol).
        lasts: whether those bytes stay as they are while their owner is held, also where something changes the thing.
    """

    read: Callable[[Iterable[Any]], Iterable[list[Any]]]
    bytes_of: Callable[[Any], Source]
    lasts: Callable[[], bool]


class Tensor(NamedTuple):
    """One tensor to save: what it is, and how its bytes get into the slab.

    Attributes:
        key: unique; begins with `replicated/` or `local/`.
        dtype: name in safetensors, a key of ITEM_BYTES.
        shape: dimensions; () for a scalar.
        write: fills the memoryview it is given (bytes, of exactly the tensor's size).
        thing: what a reader reads them from.
        reader: of all tensors that have the same one, the bytes are had together.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    write: Write
    thing: Any = None
    reader: Reader | None = None


_READER_OF = operator.attrgetter("reader")
Spec = tuple[str, str, tuple[int, ...]]


class Place(NamedTuple):
    """Where a tensor lies: offsets are in bytes from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the number of bytes that a tensor takes."""
    count = ITEM_BYTES[dtype]
    for dimension in shape:
        count *= dimension
    return count


def fill(target: memoryview, source: Any) -> None:
    """Copy an object that exposes contiguous memory into a slab, at memcpy's speed."""
    if target.nbytes:
        target[:] = memoryview(source).cast("B")


class Layout:
    """The set of tensors in a slab with their places; equal sets have equal numbers, in any process.

    Attributes:
        number: fingerprint of the set (32 bits, never 0).
        header: the file's first bytes, the same in every slab of this layout.
        places: in file order.
        size_bytes: length of the file.
    """

    def __init__(self, specs: Iterable[Spec]) -> None:
        """Order the tensors: replicated before local, large items first so that they stay aligned.

        Raises:
            SlabError: a key is in no class or not unique, or a dtype is unknown.
        """
        self.specs: tuple[Spec, ...] = tuple(specs)
        _check_specs(self.specs)
        ordered = sorted(self.specs, key=lambda spec: (not spec[0].startswith(REPLICATED), -ITEM_BYTES[spec[1]]))
        entries: dict[str, Any] = {}
        offset, spans = 0, []
        for key, dtype, shape in ordered:
            end = offset + size_bytes(dtype, shape)
            entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            spans.append((offset, end))
            offset = end
        self.number = zlib.crc32(json.dumps(entries).encode()) or 1
        metadata = {"format": FORMAT, "version": FORMAT_VERSION, "layout": str(self.number)}
        text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = _LENGTH.pack(len(text)) + text
        base = len(self.header)
        self.places: list[Place] = [
            Place(key, dtype, shape, base + begin, base + end)
            for (key, dtype, shape), (begin, end) in zip(ordered, spans)
        ]
        self.size_bytes = base + offset


def _check_specs(specs: Sequence[Spec]) -> None:
    seen = set()
    for key, dtype, shape in specs:
        if not key.startswith((REPLICATED, LOCAL)):
            raise SlabError(f"key {key!r} begins neither with {REPLICATED!r} nor with {LOCAL!r}")
        if key in seen:
            raise SlabError(f"two tensors have the key {key!r}")
        if dtype not in ITEM_BYTES or any(dimension < 0 for dimension in shape):
            raise SlabError(f"tensor {key!r} has dtype {dtype!r} and shape {shape}")
        seen.add(key)


class Writer:
    """A slab mapped for writing; all slabs of a layout share the layout."""

    def __init__(self, fd: int, layout: Layout) -> None:
        """Map `fd`, which stays the caller's."""
        self._memory = mmap.mmap(fd, layout.size_bytes, mmap.MAP_SHARED)
        whole = memoryview(self._memory)
        self._targets = {place.key: whole[place.begin : place.end] for place in layout.places}
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ranges = {place.key: (self._address + place.begin, place.end - place.begin) for place in layout.places}
        self._pieces = pieces_in(size for _, size in self._ranges.values())
        self._whole, self._header = whole, layout.header
        self._has_header = False

    def write(self, tensors: Iterable[Tensor], left_bytes: int = 0) -> Copying:
        """Copy every tensor to its place. The slab's seal must have been cleared.

        Args:
            left_bytes: of those that have a reader, about so many may be copied later, by what is returned, where they
                stay as they are until then and the others are few.

        Returns:
            What was copied, or is still to be.
        """
        if not self._has_header:
            self._whole[: len(self._header)] = self._header
            self._has_header = True
        others: list[tuple[Write, memoryview]] = []
        readers: set[Reader] = set()
        with Copying(self._pieces) as copying:
            for reader, alike in itertools.groupby(tensors, _READER_OF):
                if reader is None:
                    others += [(tensor.write, self._targets[tensor.key]) for tensor in alike]
                else:
                    readers.add(reader)
                    self._give(copying, reader, alike)
            if left_bytes and all(reader.lasts() for reader in readers) and _are_few(others):
                _write_each(others)
                others.clear()
                copying.leave(left_bytes)
        in_shares(shares_of(others, lambda other: other[1].nbytes), _write_each)
        return copying

    def _give(self, copying: Copying, reader: Reader, tensors: Iterable[Tensor]) -> None:
        """Have tensors be copied that one reader has, the first ones before the last are looked at."""
        listed, things = itertools.tee(tensors)
        for values in reader.read(tensor.thing for tensor in things):
            keys = [tensor.key for tensor in itertools.islice(listed, len(values))]
            if len(keys) < len(values):
                raise SlabError(f"{len(values) - len(keys)} more were read than there are")
            ranges, done = [self._ranges[key] for key in keys], 0
            while (done := done + copying.give_each(ranges[done:], values[done:])) < len(values):
                source, (to, size) = reader.bytes_of(values[done]), ranges[done]
                if source.size_bytes != size:
                    raise SlabError(f"{keys[done]!r} has {source.size_bytes} bytes, its place {size}")
                copying.give(to, source)
                done += 1
        for tensor in listed:
            raise SlabError(f"{tensor.key!r} was not read")

    def populate(self, go_on: Callable[[], bool]) -> None:
        """Map all pages in, so that the first copy meets no page fault. Other threads run on meanwhile."""
        pages.populate(self._address, len(self._memory), go_on)

    def close(self) -> None:
        """Unmap it; `populate` must not be running."""
        for target in self._targets.values():
            target.release()
        self._whole.release()
        self._memory.close()


def _are_few(others: Iterable[tuple[Write, memoryview]]) -> bool:
    return sum(target.nbytes for _, target in others) < SHARE_BYTES


def _write_each(others: Iterable[tuple[Write, memoryview]]) -> None:
    for write, target in others:
        write(target)


def parse(data: Any, length_bytes: int) -> tuple[dict[str, Place], dict[str, str]]:
    """Read the header of a safetensors file and check all of it.

    Args:
        data: anything that can be sliced to bytes.
        length_bytes: length of the file within `data`.

    Returns:
        The places by key, in file order, and the metadata.

    Raises:
        SlabError: the header is malformed, or the tensors leave holes, overlap or do not end with the file.
    """
    if length_bytes < _LENGTH.size:
        raise SlabError(f"{length_bytes} bytes are too short for a slab")
    (header_bytes,) = _LENGTH.unpack(bytes(data[: _LENGTH.size]))
    base = _LENGTH.size + header_bytes
    if header_bytes > _HEADER_BYTES_MAX or base > length_bytes:
        raise SlabError(f"a header of {header_bytes} bytes in a slab of {length_bytes}")
    text = bytes(data[_LENGTH.size : base])
    if not text.startswith(b"{"):
        raise SlabError("the header does not begin with '{'")
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
        metadata = entries.pop("__metadata__", {})
        places = [
            Place(key, entry["dtype"], tuple(entry["shape"]), base + entry["data_offsets"][0],
                  base + entry["data_offsets"][1])
            for key, entry in entries.items()
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SlabError(f"malformed header: {error}") from error
    places.sort(key=lambda place: (place.begin, place.end))
    at = base
    for place in places:
        if place.dtype not in ITEM_BYTES or place.begin != at or place.end - at != size_bytes(place.dtype, place.shape):
            raise SlabError(f"tensor {place.key!r} ({place.dtype} {place.shape}) does not fill its place")
        at = place.end
    if at != length_bytes:
        raise SlabError(f"the tensors end at byte {at} of {length_bytes}")
    return {place.key: place for place in places}, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


# --- what varies in size ---

_BLOB_CAPACITY_MIN = 1024


def blob(key: str, payload: bytes, capacity_bytes: int) -> Tensor:
    """Make a byte tensor of fixed size from a payload of varying size: its length (8 bytes), the payload, zeros.

    Raises:
        SlabError: the payload does not fit.
    """
    if len(payload) + _LENGTH.size > capacity_bytes:
        raise SlabError(f"{key!r}: {len(payload)} bytes do not fit into {capacity_bytes}")
    body = (_LENGTH.pack(len(payload)) + payload).ljust(capacity_bytes, b"\0")

    def write(target: memoryview) -> None:
        target[:] = body

    return Tensor(key, "U8", (capacity_bytes,), write)


def read_blob(raw: Any, key: str = "") -> bytes:
    """Return the payload of a tensor made by `blob`.

    Raises:
        SlabError: its length does not fit.
    """
    body = bytes(raw)
    if len(body) < _LENGTH.size or _LENGTH.unpack_from(body)[0] > len(body) - _LENGTH.size:
        raise SlabError(f"{key!r} holds no blob")
    return body[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(body)[0]]


class Blobs:
    """Makes blobs whose capacity doubles where a payload outgrows it, so that layouts change seldom."""

    def __init__(self) -> None:
        self._capacity_bytes: dict[str, int] = {}

    def tensor(self, key: str, payload: bytes) -> Tensor:
        capacity = self._capacity_bytes.get(key, _BLOB_CAPACITY_MIN)
        while capacity < len(payload) + _LENGTH.size:
            capacity *= 2
        self._capacity_bytes[key] = capacity
        return blob(key, payload, capacity)
