"""The commit protocol on every store: racing generations, and answers that get lost on the way back.

KEEPSTEP_TEST_ALL=1: they race a hundred times on each, on S3 as well, which takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from pathlib import Path

import pytest

from keepstep.adapters.s3 import S3Store
from keepstep.adapters.store_directory import DirectoryStore
from keepstep.checkpoint.commit import Fenced, commit, read_head, read_manifest
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.retrying import RetryingStore
from keepstep.ports.store import Conflict, ObjectStore
from tests.support.s3 import bucket_store, localstack_server, s3_server
from tests.support.stores import TroubledStore, committed, fail_at, memory_store, stored_checkpoint

moto = pytest.fixture(scope="module")(s3_server)
localstack = pytest.fixture(scope="module")(localstack_server)
GENERATIONS, ROUNDS = 16, 100
EVERYTHING = bool(os.environ.get("KEEPSTEP_TEST_ALL"))

pytestmark = pytest.mark.timeout(1800 if EVERYTHING else 120)


@pytest.fixture(params=["memory", "directory", "moto", pytest.param("localstack", marks=pytest.mark.localstack)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return memory_store()
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    return bucket_store(request.getfixturevalue(request.param), f"b{uuid.uuid4().hex[:12]}", "below")


def rounds_of(store: ObjectStore) -> int:
    """How often they race: a hundred times where that is asked for, else as often as it takes a few seconds."""
    return ROUNDS if EVERYTHING else 2 if isinstance(store, S3Store) else 8


def test_of_racing_generations_the_newest_has_head_and_the_others_know(store):
    """HEAD never goes back to an older generation, whoever looks and whenever: there is one lineage."""
    seen, over = [], threading.Event()

    def look() -> None:
        while not over.is_set():
            head = read_head(store, "job").head
            if head is not None and (head.generation, head.step) not in seen[-1:]:
                seen.append((head.generation, head.step))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for number in range(rounds_of(store)):
            race_once(store, GENERATIONS * number)
    finally:
        over.set()
        watcher.join()
    assert seen
    assert seen == sorted(seen)


def race_once(store: ObjectStore, before: int) -> None:
    """All generations after `before` commit at the same moment."""
    numbers = range(before + 1, before + GENERATIONS + 1)
    manifests = [stored_checkpoint(store, ManifestName(n, 10 * n, f"run{n}")) for n in numbers]
    outcomes: dict[int, str] = {}
    together = threading.Barrier(GENERATIONS)

    def race(manifest) -> None:
        together.wait(30)
        while manifest.generation not in outcomes:
            with contextlib.suppress(Conflict):  # so many were first: the agent tries again, too
                try:
                    commit(RetryingStore(store), manifest)
                    outcomes[manifest.generation] = "committed"
                except Fenced:
                    outcomes[manifest.generation] = "fenced"

    threads = [threading.Thread(target=race, args=(manifest,)) for manifest in manifests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = numbers[-1]
    assert set(outcomes) == set(numbers)
    assert outcomes[newest] == "committed"
    head = read_head(store, "job").head
    assert head is not None
    assert (head.generation, head.step, head.manifest) == (newest, 10 * newest, manifests[-1].key)
    assert read_manifest(store, "job", head.manifest) == manifests[-1]
    for manifest in manifests[:-1]:
        with pytest.raises(Fenced):
            commit(store, manifest)


def test_answers_that_get_lost_are_found_again(store):
    committed(store, 1, 10)
    manifest = stored_checkpoint(store, ManifestName(2, 20, "b"))
    number = 0
    while True:
        troubled = TroubledStore(store, after=fail_at(number))
        assert commit(RetryingStore(troubled, pause=lambda seconds: None), manifest) == manifest.key
        if troubled.operations <= number:
            break
        number += 1
        manifest = stored_checkpoint(store, ManifestName(2 + number, 20, "b"))
    assert number >= 5
    assert read_manifest(store, "job", manifest.key) == manifest


def test_answers_of_s3_that_get_lost_below_the_client_are_found_again(moto):
    """Each put is carried out, its answer thrown away, and the request sent again by the client library itself."""
    store = bucket_store(moto, f"b{uuid.uuid4().hex[:12]}")
    again = []

    def lose(attempts: int, **_: object) -> float | None:
        if attempts > 1:
            return None
        again.append(attempts)
        return 0.0

    store._client.meta.events.register("needs-retry.s3.PutObject", lose)
    for generation in (1, 2):
        manifest = committed(store, generation, 10 * generation, run=f"run{generation}")
        head = read_head(store, "job").head
        assert head is not None
        assert head.manifest == manifest.key
    assert len(again) == 2 * (4 + 2 + 3)  # four objects, two tables; HEAD claimed, manifest, HEAD


def test_s3_is_given_the_checksum_to_check(moto):
    store = bucket_store(moto, f"b{uuid.uuid4().hex[:12]}")
    sent = []
    store._client.meta.events.register(
        "before-send.s3.PutObject", lambda request, **_: sent.append(request.headers["x-amz-checksum-crc32c"])
    )
    store.put("job/a", b"123456789", crc32c=0xE3069283)
    assert sent == [b"4waSgw=="]
