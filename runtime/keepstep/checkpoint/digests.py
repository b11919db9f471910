"""CRC32C of memory and of parts of files, and the CRC of the whole from those of its parts.

CRC32C (Castagnoli) because S3 checks and stores it, TensorFlow uses it, and it can be combined without reading again.
The library is loaded at the first use, so that only the uploader's process pays for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

CHUNK_BYTES = 1 << 20
"""A fresh piece of this size stays in the processor's cache between reading and summing: twice as fast as 8 MiB."""
_PART_BYTES, _THREADS_MAX = 16 << 20, 8
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
            raise _short(at, end)
        at += len(piece)
        yield piece


def file_crc32c(fd: int, start: int, size_bytes: int) -> int:
    """CRC32C of a part of a file.

    Raises:
        ShortSlab: the file ends before.
    """
    crc, at, end = 0, start, start + size_bytes
    with memoryview(bytearray(min(CHUNK_BYTES, size_bytes))) as piece:  # one for all: a new one is had page by page
        while at < end:
            count = os.preadv(fd, [piece[: end - at]], at)
            if not count:
                raise _short(at, end)
            crc, at = crc32c(piece[:count], crc), at + count
    return crc


def parallel_crc32c(fd: int, start: int, size_bytes: int) -> int:
    """The same by as many threads as there are processors, for what somebody waits for; small parts by this one.

    Raises:
        ShortSlab: the file ends before.
    """
    parts = [(at, min(_PART_BYTES, start + size_bytes - at)) for at in range(start, start + size_bytes, _PART_BYTES)]
    threads = min(len(os.sched_getaffinity(0)), _THREADS_MAX, len(parts))
    if threads < 2:
        return file_crc32c(fd, start, size_bytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="crc32c") as pool:
        crcs = list(pool.map(lambda part: file_crc32c(fd, *part), parts))
    return combine_crc32c((crc, size) for crc, (_, size) in zip(crcs, parts, strict=True))


def _short(at: int, end: int) -> ShortSlab:
    return ShortSlab(f"the file ends at byte {at}, {end - at} bytes before it should")
