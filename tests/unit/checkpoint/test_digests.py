from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import digests
from keepstep.checkpoint.digests import (
    CHUNK_BYTES,
    ShortSlab,
    combine_crc32c,
    crc32c,
    file_chunks,
    file_crc32c,
    format_digest,
    is_digest,
    parallel_crc32c,
)
from tests.support.slabs import memory_file


def bitwise_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_polynomial_is_castagnoli():
    assert crc32c(b"123456789") == 0xE3069283 == bitwise_crc32c(b"123456789")


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_the_crc_of_the_whole_is_that_of_its_parts(parts):
    whole = b"".join(parts)
    assert combine_crc32c((crc32c(part), len(part)) for part in parts) == crc32c(whole) == bitwise_crc32c(whole)
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    assert crc == crc32c(whole)


def test_files_are_read_in_pieces():
    content = os.urandom(1000) * (2 * CHUNK_BYTES // 1000 + 1)
    fd = memory_file(content)
    try:
        pieces = list(file_chunks(fd, 10, len(content) - 20))
        assert max(map(len, pieces)) <= CHUNK_BYTES
        assert b"".join(pieces) == content[10:-10]
        assert file_crc32c(fd, 10, 100) == crc32c(content[10:110])
        assert file_crc32c(fd, 10, 0) == 0
        with pytest.raises(ShortSlab):
            file_crc32c(fd, 10, len(content))
    finally:
        os.close(fd)


def test_digests_are_text():
    assert format_digest(0xAB) == "crc32c:000000ab"
    assert is_digest("crc32c:000000ab")
    for other in ("", "crc32c:", "crc32c:000000AB", "crc32c:000000ab0", "sha256:000000ab", "crc32c:000000ab\n"):
        assert not is_digest(other)


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_several_threads_come_to_the_same(cores, monkeypatch):
    monkeypatch.setattr(digests, "_PART_BYTES", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    content = os.urandom(25_500)
    fd = memory_file(content)
    try:
        for start, size in ((0, len(content)), (7, 25_001), (7, 999), (7, 1000), (7, 1001), (3, 0)):
            assert parallel_crc32c(fd, start, size) == crc32c(content[start : start + size])
        with pytest.raises(ShortSlab, match="ends at byte 25500, 7 bytes before"):
            parallel_crc32c(fd, 7, len(content))
    finally:
        os.close(fd)
