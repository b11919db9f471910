"""An S3 that fails, lies and is slow now and then: what is read back is what was written, or an error says so."""

from __future__ import annotations

import uuid

import pytest
from awscrt import checksums

from keepstep.adapters.s3 import S3Store
from keepstep.checkpoint.commit import commit, read_head, read_manifest
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.retrying import Patience, RetryingStore
from keepstep.ports.store import PreconditionFailed, StoreUnavailable
from tests.support.faulty_s3 import FaultyS3
from tests.support.s3 import bucket_store, localstack_server
from tests.support.stores import fetched, rank_slab, stored_checkpoint

pytestmark = pytest.mark.localstack
server = pytest.fixture(scope="module")(localstack_server)
STEPS = 12
OFTEN = {"slow_down": 0.15, "cut": 0.15, "lost_answer": 0.15, "flipped_up": 0.15, "flipped_down": 0.15}


def faulty_store(proxy: FaultyS3, server: str) -> S3Store:
    """A store behind the proxy, in a bucket of its own."""
    bucket = f"b{uuid.uuid4().hex[:12]}"
    bucket_store(server, bucket)
    return S3Store.connect(bucket, "", proxy.endpoint)


def patient(store: S3Store) -> RetryingStore:
    return RetryingStore(store, Patience(attempts=30), pause=lambda seconds: None)


def test_checkpoints_are_committed_and_restored_whatever_befalls_the_requests(server):
    with FaultyS3(server, OFTEN, seed=3) as proxy:
        store = patient(faulty_store(proxy, server))
        for step in range(1, STEPS + 1):
            manifest = stored_checkpoint(store, ManifestName(1, step, "r"))
            commit(store, manifest)
            head = read_head(store, "job").head
            assert head is not None and (head.step, head.manifest) == (step, manifest.key)
            found = read_manifest(store, "job", head.manifest)
            for rank in range(found.world_size):
                assert fetched(store, found, rank)[1] == rank_slab(rank, step)
        assert all(proxy.counts[kind] for kind in OFTEN), proxy.counts


def test_a_document_with_a_wrong_bit_is_not_believed(server):
    with FaultyS3(server, {"flipped_down": 1.0}) as proxy:
        store = faulty_store(proxy, server)
        store.put("job/a", b"as it is")
        with pytest.raises(StoreUnavailable, match="checksum"):
            store.read("job/a", 100)


def test_an_object_that_arrives_with_a_wrong_bit_is_not_stored(server):
    with FaultyS3(server, {"flipped_up": 1.0}) as proxy:
        store = faulty_store(proxy, server)
        with pytest.raises(StoreUnavailable, match=r"BadDigest|InvalidRequest"):
            store.put("job/a", b"as it is")
        assert list(store.list("")) == []


class Large:
    """More than goes up in one piece."""

    size_bytes = 65 << 20

    def __iter__(self):
        for number in range(65):
            yield bytes([number]) * (1 << 20)


def test_an_upload_whose_end_fails_late_is_not_taken_for_done(server):
    crc = 0
    for piece in Large():
        crc = checksums.crc32c(piece, crc)
    with FaultyS3(server, {"late_error": 1.0}) as proxy:
        store = faulty_store(proxy, server)
        with pytest.raises(StoreUnavailable, match="InternalError"):
            store.put("job/a", Large(), crc32c=crc)
        assert list(store.list("")) == []
        assert store.discard_unfinished("", 4e9) == 0


def test_a_swap_whose_answer_is_lost_has_happened(server):
    with FaultyS3(server, {"lost_answer": 1.0}) as proxy:
        store = faulty_store(proxy, server)
        with pytest.raises((StoreUnavailable, PreconditionFailed)):
            store.put("job/a", b"first", if_absent=True)
        assert store.read("job/a", 100) == b"first"


def test_slow_lines_carry_all_of_it(server):
    with FaultyS3(server, {"throttle": 1.0}) as proxy:
        store = faulty_store(proxy, server)
        store.put("job/a", b"x" * 300_000)
        assert store.read("job/a", 300_000) == b"x" * 300_000
        assert proxy.counts["throttle"] == proxy.counts["requests"]
