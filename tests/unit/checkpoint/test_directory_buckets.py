"""S3 Express: listings come in no order, and only for prefixes that end in a slash.

Source: Amazon S3 API, ListObjectsV2 and ListMultipartUploads for directory buckets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from keepstep.checkpoint.catalogue import checkpoints, jobs
from keepstep.checkpoint.commit import read_head
from keepstep.checkpoint.probe import probe_store
from keepstep.checkpoint.retention import Retention, sweep
from keepstep.ports.store import StoreRefused
from tests.support.stores import TroubledStore, committed, fetched, memory_store

NOW = 1_700_000_000.0


class DirectoryBucket(TroubledStore):
    """Lists as S3 Express does."""

    def __init__(self) -> None:
        super().__init__(memory_store())
        self._dice = random.Random(1)

    def list(self, prefix: str) -> Iterator[str]:
        _check(prefix)
        found = list(super().list(prefix))
        self._dice.shuffle(found)
        return iter(found)

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        _check(prefix)
        return super().discard_unfinished(prefix, before_unix)


def _check(prefix: str) -> None:
    if prefix and not prefix.endswith("/"):
        raise StoreRefused(f"no prefix in a directory bucket: {prefix}")


@pytest.mark.parametrize("every", [0, 20])
def test_it_serves_as_any_other_store(every: int) -> None:
    store = DirectoryBucket()
    probe_store(store, "job", "nonce")
    manifests = [committed(store, generation, 10 * generation) for generation in range(1, 8)]
    head = read_head(store, "job").head
    assert head is not None and head.manifest == manifests[-1].key
    sweep(store, "job", None, Retention(keep_last=3, keep_every=every), NOW)
    kept = [each for each in manifests if each.step >= 50 or (every and each.step % every == 0)]
    assert [each.manifest for each in checkpoints(store, "job")] == kept[::-1]
    assert all(fetched(store, each)[0].size_bytes > 0 for each in kept)
    assert jobs(store) == ("job",)
