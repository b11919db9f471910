"""CRC32C of memory and of parts of files, and the CRC of the whole from those of its parts.

CRC32C (Castagnoli) because S3 checks and stores it, TensorFlow uses it, and it can be combined without reading again.
The library is loaded at the first use, so that only the uploader's process pays for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

CHUNK_BYTES = 1 << 20
"""A fresh piece of this size stays in the processor's cache between reading and summing: twice as fast as 8 MiB."""
_DIGEST = re.compile(r"crc32c:[0-9a-f]{8}")


class ShortSlab(Exception):
    """A file ended before the bytes that it should hold; detail in the message."""


def crc32c(data: bytes | memoryview, previous: int = 0) -> int:
    """CRC32C of `data`, or of what `previous` was made of followed by `data`."""
    from awscrt import checksums

    return int(checksums.crc32c(data, previous))


def combine_crc32c(parts: Iterable[tuple[int, int]]) -> int:
    """CRC32C of parts put one behind the other; each part is (CRC32C, length in bytes)."""
    from awscrt import checksums

    whole = 0
    for crc, size_bytes in parts:
        whole = int(checksums.combine_crc32c(whole, crc, size_bytes))
    return whole


def format_digest(crc: int) -> str:
    """Digest as the ranks compare it and the manifest keeps it: `crc32c:` and eight hexadecimal digits."""
    return f"crc32c:{crc:08x}"


def is_digest(text: str) -> bool:
    """Whether `text` is what `format_digest` makes."""
    return _DIGEST.fullmatch(text) is not None


def file_chunks(fd: int, start: int, size_bytes: int) -> Iterator[bytes]:
    """Deliver `size_bytes` bytes of a file from `start`, at most CHUNK_BYTES in memory at a time; moves no file offset.

    Raises:
        ShortSlab: the file ends before.
    """
    at, end = start, start + size_bytes
    while at < end:
        piece = os.pread(fd, min(CHUNK_BYTES, end - at), at)
        if not piece:
            raise ShortSlab(f"the file ends at byte {at}, {end - at} bytes before it should")
        at += len(piece)
        yield piece


def file_crc32c(fd: int, start: int, size_bytes: int) -> int:
    """CRC32C of a part of a file.

    Raises:
        ShortSlab: the file ends before.
    """
    crc = 0
    for piece in file_chunks(fd, start, size_bytes):
        crc = crc32c(piece, crc)
    return crc
