"""TensorFlow's tensor bundles: an index, and data files whose names say how many there are.

`check_bundle` reads the index and the sizes of the data files; `check_tensors` reads every byte. Where an index of one
save lies beside the data of another, only the second finds it.
Source: TensorFlow's `core/protobuf/tensor_bundle.proto` and `core/util/tensor_bundle`; tried with files of TensorFlow
2.21, among them strings, states of input pipelines and slices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from keepstep.checkpoint.digests import CHUNK_BYTES, ShortSlab, crc32c, file_chunks
from keepstep.checkpoint.files.table import mask, parse_table
from keepstep.checkpoint.files.unfit import UnfitFile
from keepstep.checkpoint.files.wire import MalformedWire, Value, parse_fields, parse_varint, signed
from keepstep.core.values import frozen

INDEX_BYTES_MAX = 256 << 20
SHARDS_MAX = 100_000
_VERSION = 1
_STRING, _VARIANT = 7, 21
_ITEM_BYTES = {
    1: 4, 2: 8, 3: 4, 4: 1, 5: 2, 6: 1, 8: 8, 9: 8, 10: 1, 11: 1, 12: 1, 13: 4, 14: 2, 15: 2, 16: 2, 17: 2, 18: 16,
    19: 2, 22: 4, 23: 8, 24: 1, 25: 1,
}  # fmt: skip
"""Bytes of one value by `DataType`, of those that lie in a file as they do in memory."""


@frozen
class BundledTensor:
    """Where a tensor, or a slice of one, lies."""

    name: str
    """As in the index; what is no UTF-8 (the names of slices) is escaped."""
    dtype: int
    """TensorFlow's `DataType`."""
    shape: tuple[int, ...]
    shard: int
    offset: int
    size_bytes: int
    crc: int
    """Masked CRC32C."""


@frozen
class Index:
    """What an index says: number of data files, and the tensors by data file and place."""

    shards: int
    tensors: tuple[BundledTensor, ...]


def index_name(prefix: str) -> str:
    return f"{prefix}.index"


def shard_name(prefix: str, shard: int, shards: int) -> str:
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


def check_bundle(folder: Path, prefix: str) -> Index:
    """Read a bundle's index, and see that all data files are there and long enough.

    Raises:
        UnfitFile: one is not; no byte of the index may differ from what was written.
    """
    path = folder / index_name(prefix)
    try:
        with path.open("rb") as file:
            data = file.read(INDEX_BYTES_MAX + 1)
    except OSError as error:
        raise UnfitFile(path, f"{error.strerror}", "an index") from error
    if len(data) > INDEX_BYTES_MAX:
        raise UnfitFile(path, "an index that does not end", f"at most {INDEX_BYTES_MAX} bytes")
    index = parse_index(data, str(path))
    needed = [0] * index.shards
    for tensor in index.tensors:
        needed[tensor.shard] = max(needed[tensor.shard], tensor.offset + tensor.size_bytes)
    for shard, size_bytes in enumerate(needed):
        path = folder / shard_name(prefix, shard, index.shards)
        try:
            there = path.stat().st_size
        except OSError as error:
            raise UnfitFile(path, f"{error.strerror}", f"a data file of {size_bytes} bytes") from error
        if there < size_bytes:
            raise UnfitFile(path, f"{there} bytes", f"{size_bytes}, as its index says")
    return index


def check_tensors(folder: Path, prefix: str, index: Index) -> int:
    """Read every tensor and compare its CRC with the index; says how many bytes were read.

    Raises:
        UnfitFile: one differs, or a file ends before.
    """
    read = 0
    for shard, tensors in groupby(index.tensors, key=lambda tensor: tensor.shard):
        path = folder / shard_name(prefix, shard, index.shards)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnfitFile(path, f"{error.strerror}", "a data file") from error
        try:
            for tensor in tensors:
                made = mask(_tensor_crc(fd, tensor, str(path)))
                if made != tensor.crc:
                    raise UnfitFile(path, f"masked CRC32C {made:08x} of {tensor.name}", f"{tensor.crc:08x}")
                read += tensor.size_bytes
        finally:
            os.close(fd)
    return read


def parse_index(data: bytes, file: str) -> Index:
    """Read an index.

    Args:
        data: all of it.
        file: what to call it.

    Raises:
        UnfitFile: it is not as it was written, or of a form that this reader does not know.
    """
    entries = parse_table(data, file)
    if not entries or entries[0][0] != b"":
        raise UnfitFile(file, "no header", 'one, under the key ""')
    try:
        shards = _parse_header(entries[0][1], file)
        parsed = [_parse_entry(key, value) for key, value in entries[1:]]
    except MalformedWire as error:
        raise UnfitFile(file, str(error), "the messages of a bundle") from error
    tensors = [tensor for tensor in parsed if tensor is not None]
    for tensor in tensors:
        if tensor.shard >= shards:
            raise UnfitFile(file, f"{tensor.name} in data file {tensor.shard}", f"one of {shards}, counted from 0")
        item = _ITEM_BYTES.get(tensor.dtype)
        if item is not None and math.prod(tensor.shape) * item != tensor.size_bytes:
            shape = list(tensor.shape)
            raise UnfitFile(file, f"{tensor.name}: {tensor.size_bytes} bytes", f"{item} for each value of {shape}")
    return Index(shards, tuple(sorted(tensors, key=lambda tensor: (tensor.shard, tensor.offset, tensor.name))))


def _parse_header(message: bytes, file: str) -> int:
    fields = dict(parse_fields(message))
    shards, endianness = _number(fields.get(1, 0)), _number(fields.get(2, 0))
    version = dict(parse_fields(_message(fields.get(3, b""))))
    if endianness != 0:
        raise UnfitFile(file, f"byte order {endianness}", "little-endian (0)")
    if _number(version.get(2, 0)) > _VERSION:
        raise UnfitFile(file, f"a bundle for readers of version {version[2]!r}", f"version {_VERSION}")
    if not 1 <= shards <= SHARDS_MAX:
        raise UnfitFile(file, f"{shards} data files", f"1 to {SHARDS_MAX}")
    return shards


def _parse_entry(key: bytes, message: bytes) -> BundledTensor | None:
    """A tensor; None where only its slices lie in the files, under names of their own."""
    found: dict[int, Value] = {}
    slices = 0
    for number, value in parse_fields(message):
        found[number] = value
        slices += number == 7
    if slices:
        return None
    dims = [value for number, value in parse_fields(_message(found.get(2, b""))) if number == 2]
    shape = tuple(signed(_number(dict(parse_fields(_message(dim))).get(1, 0))) for dim in dims)
    if any(size < 0 for size in shape):
        raise MalformedWire(f"{key!r} has shape {list(shape)}")
    numbers = [_number(found.get(number, 0)) for number in (1, 3, 4, 5, 6)]
    dtype, shard, offset, size_bytes, crc = numbers
    return BundledTensor(key.decode("utf-8", "backslashreplace"), dtype, shape, shard, offset, size_bytes, crc)


def _number(value: Value) -> int:
    if not isinstance(value, int):
        raise MalformedWire("a field that is no number")
    return value


def _message(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise MalformedWire("a field that is no message")
    return value


def _tensor_crc(fd: int, tensor: BundledTensor, file: str) -> int:
    """CRC32C of a tensor, made as TensorFlow makes it."""
    values = math.prod(tensor.shape)
    try:
        if tensor.dtype not in (_STRING, _VARIANT):
            return _crc_of(fd, tensor.offset, tensor.size_bytes, 0)
        if values > tensor.size_bytes:
            raise MalformedWire(f"{values} values in {tensor.size_bytes} bytes")
        make = _strings_crc if tensor.dtype == _STRING else _variants_crc
        crc, end = make(fd, tensor.offset, tensor.offset + tensor.size_bytes, values)
    except ShortSlab as error:
        raise UnfitFile(file, str(error), f"{tensor.size_bytes} bytes of {tensor.name}") from error
    except MalformedWire as error:
        raise UnfitFile(file, str(error), f"the {values} values of {tensor.name}") from error
    except OSError as error:
        raise UnfitFile(file, f"{error.strerror}", f"the values of {tensor.name}") from error
    if end != tensor.offset + tensor.size_bytes:
        raise UnfitFile(file, f"{tensor.name} ends at byte {end}", f"{tensor.offset + tensor.size_bytes}")
    return crc


def _strings_crc(fd: int, at: int, stop: int, values: int) -> tuple[int, int]:
    """Of strings: their lengths as fixed numbers, the masked CRC of those, the strings themselves; and where they end.

    In the file the lengths are varints.
    """
    crc, total, fixed = 0, 0, bytearray()
    for size_bytes, end in _lengths(fd, at, stop, values):
        fixed += size_bytes.to_bytes(4 if size_bytes < 1 << 32 else 8, "little")
        total, at = total + size_bytes, end
        if len(fixed) >= CHUNK_BYTES:
            crc, fixed = crc32c(bytes(fixed), crc), bytearray()
    crc = _own_crc(fd, at, crc32c(bytes(fixed), crc))
    if at + 4 + total > stop:
        raise MalformedWire(f"strings of {total} bytes at byte {at + 4}, beyond byte {stop}")
    return _crc_of(fd, at + 4, total, crc), at + 4 + total


def _variants_crc(fd: int, at: int, stop: int, values: int) -> tuple[int, int]:
    """Of variants: of each the length as a fixed number, the message, and the masked CRC of all up to there."""
    crc = 0
    for _ in range(values):
        size_bytes, at = next(_lengths(fd, at, stop, 1))
        if at + size_bytes + 4 > stop:
            raise MalformedWire(f"a value of {size_bytes} bytes at byte {at}, beyond byte {stop}")
        crc = _crc_of(fd, at, size_bytes, crc32c(size_bytes.to_bytes(8, "little"), crc))
        at += size_bytes
        crc = _own_crc(fd, at, crc)
        at += 4
    return crc, at


def _own_crc(fd: int, at: int, crc: int) -> int:
    """The CRC, the masked form of itself that stands at byte `at` included.

    Raises:
        MalformedWire: another stands there.
    """
    stored = b"".join(file_chunks(fd, at, 4))
    if int.from_bytes(stored, "little") != mask(crc):
        raise MalformedWire(f"{stored.hex()} at byte {at} is not the masked CRC32C of what stands before")
    return crc32c(stored, crc)


def _lengths(fd: int, at: int, stop: int, values: int) -> Iterator[tuple[int, int]]:
    """Deliver that many varints from byte `at` of a file on, each with where it ends."""
    piece, base = b"", at
    for _ in range(values):
        if at - base + 10 > len(piece) and base + len(piece) < stop:
            base, piece = at, os.pread(fd, min(1 << 16, stop - at), at)
        size_bytes, end = parse_varint(piece, at - base)
        at = base + end
        yield size_bytes, at


def _crc_of(fd: int, start: int, size_bytes: int, crc: int) -> int:
    for piece in file_chunks(fd, start, size_bytes):
        crc = crc32c(piece, crc)
    return crc
