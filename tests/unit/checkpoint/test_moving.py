"""Up and back down again: upload, fetch, and the patience in between."""

from __future__ import annotations

import os

import pytest

from keepstep.checkpoint.digests import ShortSlab, crc32c, format_digest
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.probe import probe_store
from keepstep.checkpoint.restore import CorruptObject, NoRoom, fetch
from keepstep.checkpoint.retrying import Patience, RetryingStore
from keepstep.checkpoint.safetensors import MalformedSlab
from keepstep.checkpoint.upload import FileRanges, UploadOrder, measure_slab, upload
from keepstep.ports.store import ChecksumMismatch, Conflict, NotFound, StoreRefused, StoreUnavailable
from tests.support.slabs import memory_file, slab_bytes
from tests.support.stores import TroubledStore, committed, fail_at, fetched, memory_store, rank_slab, stored_checkpoint

NAME = ManifestName(1, 10, "r")


@pytest.fixture
def empty():
    fd = memory_file()
    yield fd
    os.close(fd)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_rank_gets_its_slab_back(world_size):
    store = memory_store()
    manifest = committed(store, 1, 10, world_size=world_size)
    for rank in range(world_size):
        done, content = fetched(store, manifest, rank)
        assert content == rank_slab(rank, 10)
        fd = memory_file(content)
        measured = measure_slab(fd, len(content))
        os.close(fd)
        assert (done.size_bytes, done.replicated, done.local) == (len(content), measured.replicated, measured.local)
        assert done.replicated == manifest.digest


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_smaller_world_takes_the_states_of_its_own_ranks(world_size):
    store = memory_store()
    manifest = committed(store, 1, 10, world_size=world_size)
    for rank in range(world_size - 1):
        assert fetched(store, manifest, rank)[1] == rank_slab(rank, 10)


@pytest.mark.parametrize(
    ("replicated", "local"),
    [(b"", b""), (b"x", b""), (b"", b"y"), (b"abc", b"d"), (os.urandom(300_001), os.urandom(99_999))],
)
def test_regions_of_any_size_come_back(replicated, local):
    store = memory_store()
    content = slab_bytes({"replicated/a": replicated, "local/b": local})
    fd = memory_file(content + b"the rest of a larger slab before")
    parts = [upload(store, fd, UploadOrder("job", NAME, rank, 5, len(content))) for rank in range(5)]
    os.close(fd)
    assert {part.replicated for part in parts} == {format_digest(crc32c(replicated))}
    assert sum(part.size_bytes for part in parts) == len(replicated) + 5 * (len(content) - len(replicated))
    from keepstep.checkpoint.manifest import build_manifest

    objects = [stored for part in parts for stored in part.objects]
    manifest = build_manifest("job", NAME, 5, parts[0].replicated, objects, 1)
    assert fetched(store, manifest, 4)[1] == content


def damaged(store, key, edit):
    store.put(key, edit(b"".join(store.get(key))))


EDITS = {
    "a flipped bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a flipped bit at the end": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "cut off": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "longer": lambda data: data + b"x",
    "much longer": lambda data: data * 3,
    "zeroed": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("what", EDITS)
def test_a_damaged_object_is_found_and_named(what, place, empty):
    store = memory_store()
    manifest = committed(store, 1, 10)
    stored = manifest.objects[place]
    damaged(store, stored.key, EDITS[what])
    if place == 3:  # the other rank's: this one does not need it
        assert fetch(store, manifest, 0, empty).replicated == manifest.digest
    else:
        with pytest.raises(CorruptObject, match=stored.key):
            fetch(store, manifest, 0, empty)


@pytest.mark.parametrize("place", range(3))
def test_a_missing_object_is_not_found(place, empty):
    store = memory_store()
    manifest = committed(store, 1, 10)
    store.delete(manifest.objects[place].key)
    with pytest.raises(NotFound, match=manifest.objects[place].key):
        fetch(store, manifest, 0, empty)


def test_a_head_of_another_layout_is_found(empty):
    """Right by its CRC, and yet no slab: the manifest's objects do not belong together."""
    store = memory_store()
    content = slab_bytes({"replicated/w": b"only four"[:4], "local/m": b"1"})
    fd = memory_file(content)
    other = upload(store, fd, UploadOrder("job", NAME, 0, 1, len(content)))
    os.close(fd)
    manifest = stored_checkpoint(store, ManifestName(1, 10, "s"), world_size=1)
    from dataclasses import replace

    mixed = replace(manifest, objects=(manifest.objects[0], other.objects[1]))
    with pytest.raises(CorruptObject, match="the tensors end"):
        fetch(store, mixed, 0, empty)


def test_no_memory_for_the_slab_is_said():
    store = memory_store()
    manifest = committed(store, 1, 10)
    read_only = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(NoRoom, match="bytes of the slab"):
        fetch(store, manifest, 0, read_only)
    os.close(read_only)


def test_a_slab_that_changes_while_it_is_read_is_not_stored():
    content = rank_slab(0, 10)
    fd = memory_file(content)
    inner = memory_store()
    writes = iter([None, lambda: os.pwrite(fd, b"!", len(content) - 1)])

    def rewrite(number: int, name: str) -> None:
        change = next(writes)
        if change is not None:
            change()

    with pytest.raises(ChecksumMismatch):
        upload(TroubledStore(inner, before=rewrite), fd, UploadOrder("job", NAME, 0, 1, len(content)))
    os.close(fd)
    assert list(inner.list("")) == ["job/objects/g1/s10/replicated-0-of-1.r"]


def test_what_is_no_slab_is_not_uploaded():
    fd = memory_file(b"no slab at all, but long enough")
    for act in (lambda: measure_slab(fd, 31), lambda: upload(memory_store(), fd, UploadOrder("job", NAME, 0, 1, 31))):
        with pytest.raises(MalformedSlab):
            act()
    with pytest.raises(ShortSlab):
        list(FileRanges(fd, ((0, 32),)))
    os.close(fd)


def test_patience_tries_again_and_ends():
    waits: list[float] = []
    inner = memory_store()
    store = RetryingStore(TroubledStore(inner, before=fail_at(0)), pause=waits.append)
    store.put("job/a", b"x" * 100)
    assert len(waits) == 1

    def never(number: int, name: str) -> None:
        raise Conflict("always")

    waits.clear()
    with pytest.raises(Conflict):
        RetryingStore(TroubledStore(inner, before=never), Patience(4, 1.0, 3.0), waits.append).stat("job/a")
    assert len(waits) == 3
    assert all(low <= wait <= high for wait, (low, high) in zip(waits, [(0.5, 1), (1, 2), (1.5, 3)], strict=True))

    def refused(number: int, name: str) -> None:
        raise StoreRefused("no permission")

    waits.clear()
    with pytest.raises(StoreRefused):
        RetryingStore(TroubledStore(inner, before=refused), pause=waits.append).delete("job/a")
    assert waits == []


class Dribble:
    """Breaks off after some bytes of each read, and gives none at all on every third."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int | None]] = []

    def get(self, key: str, start: int = 0, size: int | None = None):
        self.reads.append((start, size))
        end = len(self.data) if size is None else start + size
        nothing = len(self.reads) % 3 == 0
        if not nothing:
            yield self.data[start : min(start + 4, end)]
        if nothing or start + 4 < end:
            raise StoreUnavailable("the connection broke off")


@pytest.mark.parametrize(("start", "size"), [(0, None), (5, None), (5, 10), (0, 3)])
def test_a_read_that_breaks_off_goes_on_where_it_was(start, size):
    inner = Dribble(bytes(range(30)))
    data = b"".join(RetryingStore(inner, pause=lambda seconds: None).get("a", start, size))
    assert data == inner.data[start:][:size]
    assert inner.reads[0] == (start, size)


def test_a_read_that_never_gets_on_ends():
    def never(number: int, name: str) -> None:
        raise StoreUnavailable("always")

    store = TroubledStore(memory_store(), before=never)
    with pytest.raises(StoreUnavailable):
        list(RetryingStore(store, Patience(3), lambda seconds: None).get("a"))
    assert store.operations == 3


class Careless:
    """A store that ignores one kind of condition, as some do, or forgets to list."""

    def __init__(self, ignores: str) -> None:
        self.inner = memory_store()
        self.ignores = ignores

    def put(self, key, body, *, if_absent=False, if_match=None, crc32c=None):
        if self.ignores == "if_absent":
            if_absent = False
        if self.ignores == "if_match":
            if_match = None
        return self.inner.put(key, body, if_absent=if_absent, if_match=if_match, crc32c=crc32c)

    def list(self, prefix):
        return iter(()) if self.ignores == "list" else self.inner.list(prefix)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("ignores", "why"), [("if_absent", "If-None-Match"), ("if_match", "ignores If-Match"), ("list", "list")]
)
def test_a_store_that_ignores_conditions_is_found_out(ignores, why):
    store = Careless(ignores)
    with pytest.raises(StoreRefused, match=why):
        probe_store(store, "job", "nonce")
    assert list(store.inner.list("")) == []


def test_a_probe_whose_answers_get_lost_still_passes():
    for number in range(7):
        store = memory_store()
        troubled = RetryingStore(TroubledStore(store, after=fail_at(number)), pause=lambda seconds: None)
        probe_store(troubled, "job", "nonce")
        assert list(store.list("")) == []
