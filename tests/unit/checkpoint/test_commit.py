from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from keepstep.checkpoint.commit import Fenced, StaleStep, claim, commit, newest_checkpoint, read_head, read_manifest
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.retrying import RetryingStore
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.ports.store import Conflict, NotFound, StoreUnavailable
from tests.support.stores import (
    TroubledStore,
    committed,
    fail_at,
    fetched,
    memory_store,
    rank_slab,
    stored_checkpoint,
)


def head_of(store):
    head = read_head(store, "job").head
    return None if head is None else (head.generation, head.step, head.run)


def test_the_first_commit_claims_head_and_names_the_checkpoint():
    store = memory_store()
    manifest = committed(store, 1, 10)
    head = read_head(store, "job").head
    assert head is not None
    assert (head.generation, head.step, head.run, head.manifest) == (1, 10, "r", manifest.key)
    assert head.digest == manifest.digest
    assert read_manifest(store, "job", manifest.key) == manifest


def test_committing_again_changes_nothing():
    store = memory_store()
    manifest = committed(store, 1, 10)
    before = read_head(store, "job")
    assert commit(store, replace(manifest, created_unix=manifest.created_unix + 5)) == manifest.key
    assert read_head(store, "job") == before
    assert read_manifest(store, "job", manifest.key) == manifest


def test_a_claim_keeps_what_is_committed_and_fences_who_is_older():
    store = memory_store()
    manifest = committed(store, 1, 10, run="a")
    claim(store, "job", 2, "a")
    head = read_head(store, "job").head
    assert head is not None
    assert (head.generation, head.step, head.manifest, head.digest) == (2, 10, manifest.key, manifest.digest)
    with pytest.raises(Fenced, match="generation 2"):
        committed(store, 1, 30, run="a")
    committed(store, 2, 20, run="a")
    assert head_of(store) == (2, 20, "a")


def test_a_claim_of_an_older_generation_changes_nothing():
    store = memory_store()
    committed(store, 3, 10, run="a")
    before = read_head(store, "job")
    for generation in (2, 3):
        claim(store, "job", generation, "b")
    assert read_head(store, "job") == before


def test_a_claim_whose_answer_is_lost_is_known_by_its_nonce():
    store = memory_store()
    committed(store, 1, 10, run="a")
    claim(RetryingStore(TroubledStore(store, after=fail_at(2)), pause=lambda seconds: None), "job", 2, "a")
    assert head_of(store) == (2, 10, "a")


def test_a_newer_generation_takes_over_and_the_older_one_is_fenced():
    store = memory_store()
    committed(store, 1, 10, run="a")
    committed(store, 2, 20, run="b")
    with pytest.raises(Fenced, match="generation 2"):
        committed(store, 1, 30, run="a")
    assert head_of(store) == (2, 20, "b")
    assert "job/manifests/1-30-a.json" not in set(store.list(""))


def test_another_run_of_the_same_generation_is_fenced():
    store = memory_store()
    committed(store, 1, 10, run="a")
    with pytest.raises(Fenced, match="belongs to run a"):
        committed(store, 1, 20, run="b")


def test_an_earlier_step_of_the_same_generation_comes_too_late():
    store = memory_store()
    committed(store, 1, 20)
    with pytest.raises(StaleStep, match="comes too late"):
        committed(store, 1, 10)
    assert head_of(store) == (1, 20, "r")


def test_a_generation_that_went_back_may_commit_earlier_steps_than_the_one_before():
    store = memory_store()
    committed(store, 1, 100, run="a")
    committed(store, 2, 60, run="b")
    assert head_of(store) == (2, 60, "b")
    committed(store, 2, 70, run="b")
    assert head_of(store) == (2, 70, "b")


def test_the_same_step_with_another_state_is_refused():
    store = memory_store()
    manifest = committed(store, 1, 10)
    other = stored_checkpoint(store, manifest.name, world_size=3)
    with pytest.raises(StaleStep, match="stands already"):
        commit(store, replace(other, step=10))
    assert read_manifest(store, "job", manifest.key) == manifest


def operations_of_a_commit() -> int:
    store = memory_store()
    committed(store, 1, 10)
    troubled = TroubledStore(store)
    commit(troubled, stored_checkpoint(store, ManifestName(2, 20, "b")))
    return troubled.operations


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_dies_anywhere_leaves_the_old_or_the_new_and_can_be_finished(when):
    for number in range(operations_of_a_commit()):
        store = memory_store()
        old = committed(store, 1, 10, run="a")
        new = stored_checkpoint(store, ManifestName(2, 20, "b"))
        with pytest.raises(StoreUnavailable):
            commit(TroubledStore(store, **{when: fail_at(number)}), new)
        head = read_head(store, "job").head
        assert head is not None
        assert head.manifest in (old.key, new.key)
        assert read_manifest(store, "job", head.manifest) in (old, new)
        assert commit(store, replace(new, created_unix=1)) == new.key
        assert head_of(store) == (2, 20, "b")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), Conflict("409")])
def test_a_lost_answer_or_a_409_anywhere_is_got_over(error, first):
    for when, number in itertools.product(["before", "after"], range(12)):
        store = memory_store()
        if not first:
            committed(store, 1, 10, run="a")
        new = stored_checkpoint(store, ManifestName(2, 20, "b"))
        troubled = TroubledStore(store, **{when: fail_at(number, error)})
        assert commit(RetryingStore(troubled, pause=lambda seconds: None), new) == new.key
        assert head_of(store) == (2, 20, "b")


def test_a_rival_at_any_moment_is_either_fenced_or_fences():
    """The newer generation commits whole between any two operations of the older one's: it always has HEAD then."""
    outcomes = set()
    for number in range(operations_of_a_commit() + 4):
        store = memory_store()
        committed(store, 1, 10, run="a")
        older = stored_checkpoint(store, ManifestName(2, 20, "b"))
        newer = stored_checkpoint(store, ManifestName(3, 15, "c"))

        def rival(now: int, name: str, at=number, store=store, newer=newer) -> None:
            if now == at:
                commit(store, newer)

        troubled = TroubledStore(store, before=rival)
        try:
            commit(troubled, older)
            outcomes.add("committed first" if troubled.operations <= number else "committed")
        except Fenced:
            outcomes.add("fenced")
        if troubled.operations > number:
            assert head_of(store) == (3, 15, "c")
            assert read_manifest(store, "job", newer.key) == newer
    assert outcomes == {"fenced", "committed first"}


def test_two_committers_of_one_generation_agree():
    """A second node of the same run commits the same step in the middle of the first one's commit: both succeed."""
    for number in range(operations_of_a_commit()):
        store = memory_store()
        manifest = stored_checkpoint(store, ManifestName(1, 10, "r"))
        twin = replace(manifest, created_unix=manifest.created_unix + 1)

        def second(now: int, name: str, at=number, store=store, twin=twin) -> None:
            if now == at:
                commit(store, twin)

        assert commit(TroubledStore(store, before=second), manifest) == manifest.key
        assert head_of(store) == (1, 10, "r")


def test_endless_contention_ends():
    store = memory_store()
    committed(store, 1, 10)
    newer = stored_checkpoint(store, ManifestName(1, 20, "r"))
    count = itertools.count()

    def meddle(now: int, name: str) -> None:
        if name == "put":
            head = read_head(store, "job").head
            assert head is not None
            store.put("job/HEAD.json", replace(head, nonce=f"meddler{next(count)}").to_bytes())

    with pytest.raises(Conflict, match="changed 16 times"):
        commit(TroubledStore(store, before=meddle), newer)


def test_a_head_that_is_not_ours_is_never_overwritten():
    store = memory_store()
    store.put("job/HEAD.json", b'{"version":99}')
    with pytest.raises(MalformedDocument, match="version 1 is wanted, not 99"):
        committed(store, 1, 10)
    assert b"".join(store.get("job/HEAD.json")) == b'{"version":99}'


def test_the_next_older_checkpoint_is_found():
    store = memory_store()
    assert newest_checkpoint(store, "job", frozenset()) == (None, ())
    manifests = [committed(store, *at) for at in ((1, 10), (1, 20), (2, 15), (2, 30))]
    keys = [manifest.key for manifest in manifests]
    for without, step in ((0, 30), (1, 15), (2, 20), (3, 10), (4, 0)):
        head, unreadable = newest_checkpoint(store, "job", frozenset(keys[4 - without :]))
        assert head is not None
        assert (head.generation, head.step, unreadable) == (2, step, ())
        assert head.manifest == (keys[3 - without] if step else "")
        assert bool(head.digest) is bool(step)


def test_older_manifests_that_can_not_be_read_are_passed_over_and_named():
    store = memory_store()
    manifests = [committed(store, 1, step) for step in (10, 20, 30)]
    store.put(manifests[1].key, b"rubbish")
    head, unreadable = newest_checkpoint(store, "job", frozenset({manifests[2].key}))
    assert head is not None
    assert (head.step, unreadable) == (10, (manifests[1].key,))


def test_a_manifest_under_another_name_is_none():
    store = memory_store()
    manifest = committed(store, 1, 10)
    store.put("job/manifests/1-11-r.json", manifest.to_bytes())
    with pytest.raises(MalformedDocument, match="holds the manifest"):
        read_manifest(store, "job", "job/manifests/1-11-r.json")
    with pytest.raises(NotFound):
        read_manifest(store, "job", "job/manifests/1-12-r.json")


def test_who_saves_a_committed_step_alone_is_refused_and_has_written_over_nothing():
    """It has not heard of the commit; its objects bear names of its own, as the node decides."""
    store = memory_store()
    manifest = committed(store, 1, 10)
    alone = replace(stored_checkpoint(store, ManifestName(1, 10, "r-alone1"), world_size=1), run="r")
    with pytest.raises(StaleStep):
        commit(store, alone)
    assert not {stored.key for stored in alone.objects} & {stored.key for stored in manifest.objects}
    for rank in range(2):
        assert fetched(store, manifest, rank)[1] == rank_slab(rank, 10)
