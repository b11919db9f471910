from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.adapters.store_memory import MemoryStore
from keepstep.checkpoint.commit import Fenced, commit, put_manifest, read_head
from keepstep.checkpoint.keys import ManifestName, local_key, tensors_key
from keepstep.checkpoint.retention import Retention, Swept, plan_retention, sweep
from keepstep.ports.store import StoreUnavailable
from tests.support.stores import TroubledStore, committed, fail_at, memory_store, stored_checkpoint

NOW = 1_700_000_000.0
LATER = NOW + 10_000


def names(*pairs: tuple[int, int]) -> list[ManifestName]:
    return [ManifestName(generation, step, "r") for generation, step in pairs]


@pytest.mark.parametrize(
    ("present", "last", "every", "restoring", "doomed"),
    [
        ([], 3, 0, [], []),
        ([(1, 10), (1, 20), (1, 30)], 3, 0, [], []),
        ([(1, 10), (1, 20), (1, 30)], 1, 0, [], [(1, 10), (1, 20)]),
        ([(1, 10), (1, 20), (1, 30)], 1, 20, [], [(1, 10)]),
        ([(1, 10), (1, 20), (1, 30)], 1, 0, [(1, 10)], [(1, 20)]),
        # a later generation that resumed earlier counts as newer
        ([(1, 30), (2, 20)], 1, 0, [], [(1, 30)]),
        # of two for one step the newest generation's is the n-th
        ([(1, 20), (2, 20), (2, 30)], 1, 20, [], [(1, 20)]),
        ([(9, 5), (10, 4)], 1, 0, [], [(9, 5)]),
    ],
)
def test_what_is_let_go(present, last, every, restoring, doomed):
    assert plan_retention(names(*present), last, every, names(*restoring)) == frozenset(names(*doomed))


@given(
    st.sets(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=20),
    st.integers(1, 6),
    st.integers(0, 10),
    st.data(),
)
def test_what_stays_is_what_was_promised(present, last, every, data):
    everything = names(*present)
    restoring = data.draw(st.sets(st.sampled_from(everything))) if everything else set()
    doomed = plan_retention(everything, last, every, restoring)
    kept = set(everything) - doomed
    assert set(sorted(everything)[-last:]) <= kept
    assert restoring <= kept
    if every:
        steps = {name.step for name in everything if name.step % every == 0}
        assert steps <= {name.step for name in kept}
    assert len(kept) <= last + len(restoring) + (40 // every if every else 0)
    assert plan_retention(kept, last, every, restoring) == frozenset()


@pytest.mark.parametrize(("last", "every"), [(0, 0), (-1, 0), (1, -1)])
def test_nothing_may_not_be_kept(last, every):
    with pytest.raises(ValueError):
        plan_retention([], last, every, [])


def test_a_sweep_removes_checkpoints_whole_and_leaves_the_newest():
    store = memory_store()
    manifests = [committed(store, 1, step) for step in (10, 20, 30)]
    assert sweep(store, "job", 1, Retention(1), NOW) == Swept(manifests=2, objects=12, unfinished=0)
    tables = {tensors_key("job", manifests[2].name, rank) for rank in range(2)}
    left = {manifests[2].key, "job/HEAD.json", *tables, *(stored.key for stored in manifests[2].objects)}
    assert set(store.list("")) == left
    assert sweep(store, "job", 1, Retention(1), LATER) == Swept(0, 0, 0)


def test_the_one_being_restored_stays():
    store = memory_store()
    manifests = [committed(store, 1, step) for step in (10, 20, 30)]
    assert sweep(store, "job", 1, Retention(1, restoring=frozenset({manifests[0].key})), NOW).manifests == 1
    assert manifests[0].key in set(store.list(""))
    assert manifests[0].local(0).key in set(store.list(""))


def test_garbage_goes_after_the_grace_and_what_is_being_made_stays():
    store = memory_store()
    committed(store, 2, 20)
    old = stored_checkpoint(store, ManifestName(1, 30, "r"))  # a generation that died before its commit
    coming = stored_checkpoint(store, ManifestName(2, 30, "r"))
    store.put("job/probe/forgotten", b"x")
    store.put("job/something/else", b"not ours to delete")
    store.put("job/objects/g1/s1/unknown", b"not ours to delete")
    assert sweep(store, "job", 2, Retention(1, grace_s=100), NOW + 99) == Swept(0, 0, 0)
    assert sweep(store, "job", 2, Retention(1, grace_s=100), NOW + 101) == Swept(0, 7, 0)
    left = set(store.list(""))
    assert not left & {stored.key for stored in old.objects}
    assert {stored.key for stored in coming.objects} <= left
    assert {"job/something/else", "job/objects/g1/s1/unknown"} <= left


def test_a_manifest_that_head_is_about_to_name_stays():
    store = memory_store()
    committed(store, 1, 10)
    coming = stored_checkpoint(store, ManifestName(1, 20, "r"))
    store.put(coming.key, coming.to_bytes())
    assert sweep(store, "job", 1, Retention(1), LATER) == Swept(0, 0, 0)


def test_before_the_first_commit_nothing_is_garbage():
    store = memory_store()
    stored_checkpoint(store, ManifestName(1, 10, "r"))
    assert sweep(store, "job", 1, Retention(1), LATER) == Swept(0, 0, 0)
    assert len(set(store.list(""))) == 6


def test_uploads_that_were_given_up_before_the_first_commit_go():
    """As those of a job that commits nothing but its script's own files."""

    class Begun(MemoryStore):
        def discard_unfinished(self, prefix: str, before_unix: float) -> int:
            seen.append((prefix, before_unix))
            return 1

    seen: list[tuple[str, float]] = []
    assert sweep(Begun(lambda: NOW), "job", 1, Retention(1, grace_s=60.0), NOW) == Swept(0, 0, 1)
    assert seen == [("job/", NOW - 60.0)]


def test_a_stale_generation_sweeps_nothing():
    store = memory_store()
    for step in (10, 20):
        committed(store, 2, step)
    before = set(store.list(""))
    with pytest.raises(Fenced):
        sweep(store, "job", 1, Retention(1), LATER)
    assert set(store.list("")) == before
    assert sweep(store, "job", None, Retention(1), LATER).manifests == 1


def test_a_manifest_that_can_not_be_read_goes_and_its_objects_follow():
    store = memory_store()
    manifests = [committed(store, 1, step) for step in (10, 20)]
    store.put(manifests[0].key, b"rubbish")
    assert sweep(store, "job", 1, Retention(1), NOW) == Swept(1, 0, 0)
    assert sweep(store, "job", 1, Retention(1), LATER) == Swept(0, 6, 0)


def test_a_sweep_that_breaks_off_anywhere_leaves_every_listed_checkpoint_whole():
    total = run_broken(10_000)
    assert total > 15
    for number in range(total):
        run_broken(number)


def run_broken(number: int) -> int:
    inner = memory_store()
    for step in (10, 20, 30):
        committed(inner, 1, step)
    store = TroubledStore(inner, before=fail_at(number))
    try:
        sweep(store, "job", 1, Retention(1), NOW)
    except StoreUnavailable:
        assert number < 10_000
    check_whole(inner)
    sweep(inner, "job", 1, Retention(1), LATER)
    check_whole(inner)
    assert len(set(inner.list(""))) == 2 + 4 + 2
    return store.operations


def check_whole(store: MemoryStore) -> None:
    from keepstep.checkpoint.commit import read_manifest

    keys = set(store.list(""))
    for key in keys:
        if key.startswith("job/manifests/"):
            assert {stored.key for stored in read_manifest(store, "job", key).objects} <= keys
    head = read_head(store, "job").head
    assert head is not None
    assert head.manifest in keys


def test_a_new_commit_after_a_sweep_goes_on():
    store = memory_store()
    committed(store, 1, 10)
    coming = stored_checkpoint(store, ManifestName(1, 20, "r"))
    sweep(store, "job", 1, Retention(1, grace_s=0), LATER)
    commit(store, coming)
    assert local_key("job", coming.name, 0) in set(store.list(""))


def test_what_head_never_named_is_none_of_those_to_keep():
    store = memory_store()
    for step in (10, 20):
        committed(store, 1, step)
    for step in (30, 40):
        put_manifest(store, stored_checkpoint(store, ManifestName(1, step, "r")))
    assert sweep(store, "job", 1, Retention(2), NOW).manifests == 0
    assert read_head(store, "job").head.step == 20
