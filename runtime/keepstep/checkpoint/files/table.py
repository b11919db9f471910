"""The sorted table that TensorFlow keeps an index in: keys and values in blocks, each with its CRC.

Layout: data blocks, one metaindex block, one index block, a footer of 48 bytes. Each block is followed by one byte that
names its compression and by the masked CRC32C of both. Nothing lies between them, so that every byte of a table is
either under a CRC or known beforehand.
Source: LevelDB's description of its tables, TensorFlow's `lib/io/format`; tried with files of TensorFlow 2.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.files.unfit import UnfitFile
from keepstep.checkpoint.files.wire import MalformedWire, parse_varint

MAGIC = 0xDB4775248B80FB57
MAGIC_BYTES = MAGIC.to_bytes(8, "little")
"""A table's last ones."""
_FOOTER_BYTES, _TRAILER_BYTES, _KEY_BYTES_MAX = 48, 5, 1 << 16
_UNCOMPRESSED = 0
_COMPRESSIONS = {1: "Snappy"}
_MASK_DELTA = 0xA282EAD8

Handle = tuple[int, int]
"""Where a block begins, and its length without its trailer, in bytes."""


def mask(crc: int) -> int:
    """The form in which TensorFlow stores a CRC32C, so that the CRC of data that hold CRCs stays of use."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def parse_table(data: bytes, file: str) -> list[tuple[bytes, bytes]]:
    """Keys and values of a table, in the order of the keys.

    Args:
        data: the whole table.
        file: what to call it.

    Raises:
        UnfitFile: any byte is not as it was written, as far as the CRCs tell.
    """
    metaindex, index = _parse_footer(data, file)
    handles = [_parse_handle(value, 0, file)[0] for _, value in _entries(_block(data, index, file), file)]
    end = 0
    for offset, size_bytes in (*handles, metaindex, index):
        if offset != end:
            raise UnfitFile(file, f"a block at byte {offset}", f"one at byte {end}, where the one before it ends")
        end = offset + size_bytes + _TRAILER_BYTES
    if end != len(data) - _FOOTER_BYTES:
        raise UnfitFile(file, f"blocks that end at byte {end}", f"the footer behind them, at {len(data) - 48}")
    list(_entries(_block(data, metaindex, file), file))
    found = [entry for handle in handles for entry in _entries(_block(data, handle, file), file)]
    for (before, _), (after, _) in pairwise(found):
        if before >= after:
            raise UnfitFile(file, f"key {after!r} behind {before!r}", "ascending keys")
    return found


def _parse_footer(data: bytes, file: str) -> tuple[Handle, Handle]:
    if len(data) < _FOOTER_BYTES:
        raise UnfitFile(file, f"{len(data)} bytes", f"at least the {_FOOTER_BYTES} of a table's footer")
    footer = data[-_FOOTER_BYTES:]
    magic = int.from_bytes(footer[-8:], "little")
    if magic != MAGIC:
        raise UnfitFile(file, f"{magic:#018x} in its last 8 bytes", f"{MAGIC:#018x}, as a complete table ends")
    metaindex, at = _parse_handle(footer, 0, file)
    index, at = _parse_handle(footer, at, file)
    if any(footer[at:-8]):
        raise UnfitFile(file, f"{footer[at:-8].hex()} behind the handles of the footer", "zeros")
    return metaindex, index


def _parse_handle(data: bytes, at: int, file: str) -> tuple[Handle, int]:
    try:
        offset, at = parse_varint(data, at)
        size_bytes, at = parse_varint(data, at)
    except MalformedWire as error:
        raise UnfitFile(file, str(error), "the place of a block") from error
    return (offset, size_bytes), at


def _block(data: bytes, handle: Handle, file: str) -> bytes:
    """A block's bytes without its trailer, as its CRC says they were written."""
    offset, size_bytes = handle
    end = offset + size_bytes
    if end + _TRAILER_BYTES > len(data) - _FOOTER_BYTES:
        raise UnfitFile(file, f"a block from byte {offset} to {end} in a file of {len(data)} bytes", "it to fit")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_BYTES], "little")
    made = mask(crc32c(data[offset : end + 1]))
    if made != stored:
        raise UnfitFile(file, f"masked CRC32C {made:08x} of the block at byte {offset}", f"{stored:08x}, as it says")
    if data[end] != _UNCOMPRESSED:
        name = _COMPRESSIONS.get(data[end], "an unknown method")
        raise UnfitFile(file, f"a block compressed with {name} ({data[end]})", "none (0), as TensorFlow writes")
    return data[offset:end]


def _entries(block: bytes, file: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block: a key says how much of the one before it it shares, save where a restart begins."""
    count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * count
    if len(block) < 4 or end < 0:
        raise UnfitFile(file, f"{count} restarts in a block of {len(block)} bytes", "them to fit")
    restarts = {int.from_bytes(block[at : at + 4], "little") for at in range(end, len(block) - 4, 4)}
    at, key = 0, b""
    try:
        while at < end:
            begin = at
            shared, at = parse_varint(block, at)
            own, at = parse_varint(block, at)
            size_bytes, at = parse_varint(block, at)
            if shared > (0 if begin in restarts else len(key)) or shared + own > _KEY_BYTES_MAX:
                raise MalformedWire(f"the key at byte {begin} of a block can not be")
            key = key[:shared] + block[at : at + own]
            at += own + size_bytes
            if at > end:
                raise MalformedWire(f"the entry at byte {begin} of a block goes beyond it")
            yield key, block[at - size_bytes : at]
    except MalformedWire as error:
        raise UnfitFile(file, str(error), "keys and values") from error
