"""Checkpoints read where they lie: whole slabs, single tensors, what is wrong, what differs; and copies of them."""

from __future__ import annotations

import pytest

from keepstep.checkpoint import catalogue, reading
from keepstep.checkpoint.commit import commit, newest_checkpoint, read_manifest
from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.reading import Difference, StoredSlab
from keepstep.checkpoint.restore import CorruptObject
from keepstep.ports.store import ChecksumMismatch
from tests.support.stores import committed, memory_store, rank_slab


def nobody(size_bytes: int) -> None:
    """Hears of bytes that were read."""


def flip(store, key: str, at: int = 3) -> None:
    content = bytearray(b"".join(store.get(key)))
    content[at] ^= 1
    store.put(key, bytes(content))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_slab_of_each_rank_is_read_as_it_was_written(world_size: int) -> None:
    store = memory_store()
    manifest = committed(store, 1, 20, world_size=world_size)
    for rank in range(world_size):
        slab, written = StoredSlab(store, manifest, rank), rank_slab(rank, 20)
        told: list[int] = []
        copied: list[bytes] = []
        slab.copy_to(copied.append, told.append)
        assert b"".join(copied) == written
        assert sum(told) == slab.size_bytes == len(written)
        assert [tensor.key for tensor in slab.tensors] == ["replicated/w", "local/moments"]
        for begin in range(0, len(written), 7):
            assert b"".join(slab.read(begin, begin + 31)) == written[begin : begin + 31]
        head = len(slab.head)
        wanted = {each.key: crc32c(written[head + each.start : head + each.stop]) for each in slab.tensors}
        assert slab.digests(nobody) == wanted


def test_every_object_that_is_not_what_it_was_is_named() -> None:
    store = memory_store()
    manifest = committed(store, 1, 20)
    assert reading.verify(store, manifest, nobody) == []
    share, gone = manifest.objects[1].key, manifest.objects[3].key
    flip(store, share)
    store.delete(gone)
    wrong = reading.verify(store, manifest, nobody)
    assert [line.partition(":")[0] for line in wrong] == [share, gone]
    with pytest.raises(CorruptObject, match=share):
        StoredSlab(store, manifest, 0).copy_to(lambda piece: None, nobody)


def test_a_slab_whose_object_is_cut_short_is_not_delivered_as_whole() -> None:
    store = memory_store()
    manifest = committed(store, 1, 20)
    share = manifest.objects[0]
    store.put(share.key, b"".join(store.get(share.key))[:-5])
    with pytest.raises(CorruptObject, match="ends 5 bytes before"):
        list(StoredSlab(store, manifest, 0).read())


def test_only_what_differs_is_told() -> None:
    store = memory_store()
    before, after = (StoredSlab(store, committed(store, 1, step), 0) for step in (20, 30))
    assert reading.compare(before, before, nobody) == []
    found = reading.compare(before, after, nobody)
    assert [(each.key, each.what) for each in found] == [("local/moments", "changed"), ("replicated/w", "changed")]
    longer = StoredSlab(store, committed(store, 1, 300), 0)  # its step has a digit more
    found = reading.compare(before, longer, nobody)
    assert found[0] == Difference("local/moments", "reshaped", "U8 [12]", "U8 [13]")


def test_checkpoints_are_listed_newest_first_and_one_that_can_not_be_read_says_why() -> None:
    store = memory_store()
    assert catalogue.jobs(store) == ()
    manifests = [committed(store, generation, step) for generation, step in ((1, 20), (1, 30), (2, 25))]
    assert catalogue.jobs(store) == ("job",)
    flip(store, manifests[1].key)
    listed = catalogue.checkpoints(store, "job")
    assert [(each.name.generation, each.name.step, each.is_newest) for each in listed] == [
        (2, 25, True), (1, 30, False), (1, 20, False),
    ]  # fmt: skip
    assert listed[0].manifest == manifests[2] and listed[1].manifest is None and listed[1].trouble


def test_a_copy_can_be_resumed_from_and_copied_again() -> None:
    source, target = memory_store(), memory_store()
    older, newer = committed(source, 1, 20), committed(source, 2, 25)
    for manifest in (older, newer, newer):
        catalogue.copy(source, manifest, target, nobody)
    commit(target, newer)
    head, unreadable = newest_checkpoint(target, "job", frozenset())
    assert head is not None and (head.manifest, unreadable) == (newer.key, ())
    for manifest in (older, newer):
        assert read_manifest(target, "job", manifest.key) == manifest
        assert reading.verify(target, manifest, nobody) == []


def test_nothing_corrupt_is_copied() -> None:
    source, target = memory_store(), memory_store()
    manifest = committed(source, 1, 20)
    flip(source, manifest.objects[2].key)
    with pytest.raises(ChecksumMismatch):
        catalogue.copy(source, manifest, target, nobody)
    assert catalogue.checkpoints(target, "job") == ()
