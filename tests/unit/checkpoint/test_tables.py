"""CRCs of tensors: they make up those of whole ranges, and name the replica that differs."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.adapters.store_memory import MemoryStore
from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.safetensors import StoredTensor
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.checkpoint.tables import Sums, differing, read_table, write_table
from keepstep.checkpoint.upload import UploadOrder, upload
from keepstep.ports.store import NotFound
from tests.support.slabs import memory_file, slab_bytes
from tests.support.stores import memory_store

NAME = ManifestName(1, 20, "r")
SAME = {"replicated/a": b"all alike", "replicated/b": b"", "replicated/c": bytes(50), "local/moments": b"mine"}


@given(st.lists(st.integers(0, 40), max_size=12), st.data())
def test_tensors_and_ranges_have_the_crcs_of_their_bytes(sizes: list[int], data: st.DataObject) -> None:
    content = os.urandom(8 + sum(sizes))
    tensors, at = [], 0
    for number, size in enumerate(sizes):
        tensors.append(StoredTensor(f"t{number}", "U8", (size,), at, at + size))
        at += size
    cuts = sorted(data.draw(st.lists(st.integers(0, at), min_size=2, max_size=2)))
    fd = memory_file(content)
    try:
        sums = Sums(fd, 8, tensors, cuts)
    finally:
        os.close(fd)
    body = content[8:]
    assert sums.table == {each.key: f"{crc32c(body[each.start : each.stop]):08x}" for each in tensors}
    for begin, end in ((0, at), (0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], at)):
        assert sums.of(begin, end) == crc32c(body[begin:end])


def uploaded(store: MemoryStore, tensors: dict[str, bytes], rank: int, world_size: int) -> str:
    """Upload a rank's slab; the digest of what ought to be alike."""
    content = slab_bytes(tensors)
    fd = memory_file(content)
    try:
        return upload(store, fd, UploadOrder("job", NAME, rank, world_size, len(content))).replicated
    finally:
        os.close(fd)


def flipped(tensors: dict[str, bytes], key: str) -> dict[str, bytes]:
    content = bytearray(tensors[key])
    content[len(content) // 2] ^= 4
    return {**tensors, key: bytes(content)}


@pytest.mark.parametrize("key", ["replicated/a", "replicated/c"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_flipped_bit_is_found_in_the_right_replica_and_tensor(rank: int, key: str) -> None:
    store = memory_store()
    slabs = [{**SAME, "local/moments": bytes([each])} for each in range(3)]
    slabs[rank] = flipped(slabs[rank], key)
    digests = [uploaded(store, slab, each, 3) for each, slab in enumerate(slabs)]
    assert differing(store, "job", NAME, digests) == ((rank, key),)


def test_of_two_neither_can_be_told_to_be_right() -> None:
    store = memory_store()
    digests = [uploaded(store, SAME, 0, 2), uploaded(store, flipped(SAME, "replicated/c"), 1, 2)]
    assert differing(store, "job", NAME, digests) == ((0, "replicated/c"), (1, "replicated/c"))


def test_what_belongs_to_a_rank_alone_never_differs() -> None:
    store = memory_store()
    digests = [uploaded(store, {**SAME, "local/moments": bytes([each])}, each, 3) for each in range(3)]
    assert len(set(digests)) == 1
    assert differing(store, "job", NAME, digests) == ()


def test_a_table_that_is_not_there_or_none_is_no_answer() -> None:
    store = memory_store()
    with pytest.raises(NotFound):
        read_table(store, "job", NAME, 0)
    write_table(store, "job", NAME, 0, {"replicated/a": "00000000"})
    assert read_table(store, "job", NAME, 0) == {"replicated/a": "00000000"}
    for text in (b"no JSON", b'{"version":2,"tensors":{}}', b'{"version":1,"tensors":{"a":1}}', b'{"version":1}'):
        store.put("job/objects/g1/s20/tensors-0.r", text)
        with pytest.raises(MalformedDocument):
            read_table(store, "job", NAME, 0)
