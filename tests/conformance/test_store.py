"""One suite for every store: in memory, in a directory, in S3 (moto's server, and LocalStack)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from awscrt import checksums

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.adapters.store_memory import MemoryStore
from keepstep.checkpoint.probe import probe_store
from keepstep.ports.store import (
    ChecksumMismatch,
    NotFound,
    ObjectStore,
    PreconditionFailed,
    StoreRefused,
    StoreUnavailable,
)
from tests.support.s3 import bucket_store, localstack_server, s3_server

moto = pytest.fixture(scope="module")(s3_server)
localstack = pytest.fixture(scope="module")(localstack_server)


LOCALSTACK = pytest.param("localstack", marks=pytest.mark.localstack)


@pytest.fixture(params=["moto", LOCALSTACK])
def server(request: pytest.FixtureRequest) -> str:
    endpoint: str = request.getfixturevalue(request.param)
    return endpoint


@pytest.fixture(params=["memory", "directory", "moto", LOCALSTACK])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore(lambda: 1_700_000_000.0)
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    return bucket_store(request.getfixturevalue(request.param), f"b{uuid.uuid4().hex[:12]}", "some/prefix")


@dataclass
class Pieces:
    """A body of pieces that says its size, rightly or not."""

    pieces: list[bytes]
    says: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces)) if self.says is None else self.says

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pieces)


def read(store: ObjectStore, key: str, start: int = 0, size: int | None = None) -> bytes:
    return b"".join(store.get(key, start, size))


def test_what_is_put_is_read_and_seen_at_once(store):
    etag = store.put("job/a", b"hello")
    assert read(store, "job/a") == b"hello"
    found = store.stat("job/a")
    assert (found.size_bytes, found.etag) == (5, etag)
    assert found.modified_unix > 1_600_000_000
    assert list(store.list("job/")) == ["job/a"]


def test_a_body_in_pieces_is_one_object(store):
    store.put("job/a", Pieces([b"one ", b"", b"two ", b"three"]))
    assert read(store, "job/a") == b"one two three"


@pytest.mark.parametrize(
    ("start", "size", "wanted"),
    [(0, None, b"0123456789"), (3, None, b"3456789"), (3, 4, b"3456"), (8, 99, b"89"), (10, None, b""), (12, 3, b""),
     (4, 0, b""), (0, 10, b"0123456789")],
)  # fmt: skip
def test_ranges(store, start, size, wanted):
    store.put("job/a", b"0123456789")
    assert read(store, "job/a", start, size) == wanted


def test_an_empty_object_is_an_object(store):
    store.put("job/a", b"")
    assert read(store, "job/a") == b""
    assert store.stat("job/a").size_bytes == 0
    assert read(store, "job/a", 0, 8) == b""


def test_replacing_changes_the_etag_and_the_content(store):
    first = store.put("job/a", b"one")
    second = store.put("job/a", b"two")
    assert first != second
    assert store.stat("job/a").etag == second
    assert read(store, "job/a") == b"two"


def test_what_is_absent_is_not_found(store):
    with pytest.raises(NotFound):
        read(store, "job/nothing")
    with pytest.raises(NotFound):
        read(store, "job/nothing", 0, 0)
    with pytest.raises(NotFound):
        store.stat("job/nothing")
    assert list(store.list("job/")) == []
    assert list(store.list("")) == []


def test_if_absent_lets_one_write_through(store):
    store.put("job/a", b"first", if_absent=True)
    with pytest.raises(PreconditionFailed):
        store.put("job/a", b"second", if_absent=True)
    assert read(store, "job/a") == b"first"


def test_if_match_swaps_only_what_was_seen(store):
    first = store.put("job/a", b"first")
    second = store.put("job/a", b"second", if_match=first)
    with pytest.raises(PreconditionFailed):
        store.put("job/a", b"third", if_match=first)
    assert read(store, "job/a") == b"second"
    assert store.stat("job/a").etag == second
    with pytest.raises(PreconditionFailed):
        store.put("job/absent", b"x", if_match=first)


def test_of_many_racing_swaps_one_wins(store):
    etag = store.put("job/a", b"start")
    won, lost = [], []

    def swap(number: int) -> None:
        try:
            store.put("job/a", b"writer %d" % number, if_match=etag)
            won.append(number)
        except PreconditionFailed:
            lost.append(number)

    threads = [threading.Thread(target=swap, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert read(store, "job/a") == b"writer %d" % won[0]


def test_delete(store):
    etag = store.put("job/deep/er/a", b"x")
    store.put("job/b", b"y")
    store.delete("job/deep/er/a", if_match=etag)
    with pytest.raises(NotFound):
        store.stat("job/deep/er/a")
    store.delete("job/deep/er/a")
    with pytest.raises(PreconditionFailed):
        store.delete("job/b", if_match=etag)
    with pytest.raises(PreconditionFailed):
        store.delete("job/absent", if_match=etag)
    assert list(store.list("")) == ["job/b"]
    store.put("job/deep/er/a", b"again")
    assert read(store, "job/deep/er/a") == b"again"


def test_list_knows_prefixes_that_end_within_a_name(store):
    keys = {"job/objects/g1/s10/local-0.r", "job/objects/g1/s1/local-0.r", "job/HEAD.json", "job2/HEAD.json"}
    for key in keys:
        store.put(key, b"x")
    assert set(store.list("")) == keys
    assert set(store.list("job/objects/g1/s1")) == {key for key in keys if key.startswith("job/objects/g1/s1")}
    assert set(store.list("job/objects/g1/s1/")) == {"job/objects/g1/s1/local-0.r"}
    assert set(store.list("job/none/")) == set()


def test_bytes_that_are_not_those_announced_are_not_written(store):
    crc = checksums.crc32c(b"right")
    store.put("job/a", b"right", crc32c=crc)
    with pytest.raises(ChecksumMismatch):
        store.put("job/b", b"wrong", crc32c=crc)
    with pytest.raises(ChecksumMismatch):
        store.put("job/b", Pieces([b"rig", b"hx"]), crc32c=crc)
    assert list(store.list("job/")) == ["job/a"]


def test_a_source_that_breaks_off_leaves_nothing(store):
    class Broken(Exception):
        pass

    class Breaking:
        size_bytes = 10

        def __iter__(self):
            yield b"12345"
            raise Broken

    with pytest.raises(Broken):
        store.put("job/a", Breaking())
    assert list(store.list("")) == []


def test_a_small_object_that_is_not_small_is_refused(store):
    store.put("job/a", b"x" * 100)
    assert store.read("job/a", 100) == b"x" * 100
    with pytest.raises(StoreRefused):
        store.read("job/a", 99)


def test_the_probe_passes_and_leaves_nothing(store):
    probe_store(store, "job", "nonce")
    assert list(store.list("")) == []


def test_nothing_unfinished_is_left_by_finished_puts(store):
    store.put("job/a", b"x")
    assert store.discard_unfinished("job/", 4e9) == 0
    assert read(store, "job/a") == b"x"


# What only one of them has.


def test_a_large_body_goes_to_s3_in_parts(server):
    store = bucket_store(server, f"parts{uuid.uuid4().hex[:12]}")
    chunk = bytes(range(256)) * (1 << 12)  # 1 MiB
    body = Pieces([chunk] * 65 + [b"end"])
    crc = 0
    for piece in body:
        crc = checksums.crc32c(piece, crc)
    etag = store.put("job/large", body, if_absent=True, crc32c=crc)
    assert etag.endswith('-5"')  # five parts of 16 MiB at most
    assert store.stat("job/large").size_bytes == body.size_bytes
    seen = 0
    for piece in store.get("job/large"):
        seen = checksums.crc32c(piece, seen)
    assert seen == crc
    with pytest.raises(PreconditionFailed):
        store.put("job/large", body, if_absent=True)
    with pytest.raises(ChecksumMismatch):
        store.put("job/other", body, crc32c=crc ^ 1)
    assert list(store.list("")) == ["job/large"]
    assert store.discard_unfinished("", 4e9) == 0


def test_uploads_that_were_left_in_s3_are_given_up_after_the_grace(server):
    bucket = f"b{uuid.uuid4().hex[:12]}"
    store = bucket_store(server, bucket, "below")
    store._client.create_multipart_upload(Bucket=bucket, Key="below/job/a")
    assert store.discard_unfinished("job/", 0.0) == 0
    assert store.discard_unfinished("job/", 4e9) == 1
    assert store.discard_unfinished("job/", 4e9) == 0


def test_s3_says_what_is_wrong(server):
    absent = bucket_store(server, "was-never-made", make=False)
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        probe_store(absent, "job", "nonce")
    with pytest.raises(StoreUnavailable):
        bucket_store("http://127.0.0.1:9", "b", make=False).stat("job/a")


def test_a_directory_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreRefused, match=r"Not a directory|File exists"):
        DirectoryStore(tmp_path / "file" / "store")


def test_a_directory_that_vanished_is_unavailable(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "store" / ".unfinished").rmdir()
    with pytest.raises(StoreUnavailable):
        store.put("job/a", b"x")


@pytest.mark.parametrize("key", ["../a", "a/../b", "/a", "a//b", "a/", "", ".hidden", "a/.b", "a\nb", "a b", "a\0b"])
def test_a_directory_takes_no_key_that_leads_elsewhere(tmp_path, key):
    with pytest.raises(StoreRefused):
        DirectoryStore(tmp_path / "store").put(key, b"x")


def test_the_unfinished_files_of_dead_writers_are_removed_and_those_of_slow_ones_stay(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "store" / ".unfinished" / "dead").write_bytes(b"half")
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        size_bytes = 2

        def __iter__(self):
            yield b"1"
            begun.set()
            assert go_on.wait(30)
            yield b"2"

    writer = threading.Thread(target=lambda: store.put("job/slow", Slow()))
    writer.start()
    assert begun.wait(30)
    assert store.discard_unfinished("job/", 0.0) == 0
    assert store.discard_unfinished("job/", 4e9) == 1
    go_on.set()
    writer.join()
    assert read(store, "job/slow") == b"12"
