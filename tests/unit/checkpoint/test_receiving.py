"""Objects in ranges side by side: what is placed is the object, or an error says what is wrong with it."""

from __future__ import annotations

import pytest

from keepstep.checkpoint import receiving
from keepstep.checkpoint.aggregate import CorruptObject
from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.manifest import StoredObject
from keepstep.checkpoint.receiving import READINGS, Ranges, at_last
from keepstep.ports.store import StoreUnavailable
from tests.support.stores import TroubledStore, fail_at, memory_store

CONTENT = bytes(range(256)) * 40
RANGE = 1000


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(receiving, "RANGE_BYTES_MAX", RANGE)
    monkeypatch.setattr(receiving, "RANGE_BYTES_MIN", RANGE)


def stored(content: bytes = CONTENT, said: bytes = CONTENT):
    store = memory_store()
    store.put("job/a", content)
    return store, StoredObject("job/a", "replicated", 0, 0, len(said), f"{crc32c(said):08x}")


def received(store, described) -> bytes:
    placed = bytearray(described.size_bytes)

    def place(piece, at):
        placed[at : at + len(piece)] = piece

    ranges = Ranges(store)
    try:
        ranges.receive(described, place)
    finally:
        ranges.close()
    return bytes(placed)


@pytest.mark.parametrize("size", [1, RANGE - 1, RANGE, RANGE + 1, len(CONTENT)])
def test_an_object_arrives_whole(size):
    assert received(*stored(CONTENT[:size], CONTENT[:size])) == CONTENT[:size]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (CONTENT[:5000] + b"\x01" + CONTENT[5001:], "CRC32C"),
        (CONTENT[:-1], "ends at 10239, the manifest says 10240"),
        (CONTENT[: RANGE // 2], "ends at 500"),
    ],
)
def test_what_is_wrong_is_said(content, told):
    with pytest.raises(CorruptObject, match=told):
        received(*stored(content))


def test_the_store_s_own_error_is_passed_on():
    store, described = stored()
    with pytest.raises(StoreUnavailable):
        received(TroubledStore(store, before=fail_at(7)), described)


def test_what_is_wrong_on_its_way_is_read_again():
    readings = []

    def read():
        readings.append(len(readings))
        if len(readings) < READINGS:
            raise CorruptObject("a bit")

    at_last(read)
    assert len(readings) == READINGS


def test_what_is_wrong_each_time_is_given_up():
    def read():
        raise CorruptObject("a bit")

    with pytest.raises(CorruptObject):
        at_last(read)
