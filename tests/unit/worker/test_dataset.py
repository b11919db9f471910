"""The arithmetic of positions: each sample of an epoch once, whatever the world size and whenever it changes."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keepstep_worker.dataset import Dataset, Shard, part_of, weighted_part
from keepstep_worker.sources import Part, Position, next_batch

sizes = st.integers(1, 200)
batches = st.integers(1, 64)
worlds = st.integers(1, 9)


@given(begin=st.integers(0, 50), size=st.integers(0, 100), count=worlds)
def test_parts_make_up_the_batch_in_order_and_differ_by_one_at_most(begin, size, count):
    parts = [part_of(Part(begin, begin + size), index, count) for index in range(count)]
    assert [place for part in parts for place in range(*part)] == list(range(begin, begin + size))
    lengths = [part.end - part.begin for part in parts]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 1000), st.integers(0, 5000), st.lists(st.integers(1, 4000), min_size=1, max_size=9))
def test_parts_by_weight_make_up_the_batch_and_are_as_large_as_their_weights(begin, size, weights):
    parts = [weighted_part(Part(begin, begin + size), rank, weights) for rank in range(len(weights))]
    assert [begin, *(part.end for part in parts)] == [*(part.begin for part in parts), begin + size]
    for part, weight in zip(parts, weights, strict=True):
        assert abs((part.end - part.begin) - size * weight / sum(weights)) < 1


def test_weights_of_another_world_are_not_this_ones():
    batch = Part(0, 12)
    assert Shard(1, 2, weights=(1, 3)).of(batch) == Part(3, 12)
    assert Shard(1, 2, weights=(1, 3)).of(batch, 1, 2) == Part(7, 12)
    assert Shard(1, 2, weights=(1, 3, 1)).of(batch) == Part(6, 12)
    assert Shard(1, 2, weights=(0, 3)).of(batch) == Part(6, 12)


@given(size=sizes, plan=st.lists(st.tuples(batches, worlds), min_size=1, max_size=30))
def test_every_sample_once_an_epoch_though_batch_and_world_change_at_every_step(size, plan):
    position, taken = Position(), Counter()
    while position.epoch < 2:
        for global_batch, world_size in plan:
            position, batch = next_batch(position, size, global_batch, False)
            for rank in range(world_size):
                taken.update((position.epoch, place) for place in range(*part_of(batch, rank, world_size)))
    for epoch in (0, 1):
        assert [taken[epoch, place] for place in range(size)] == [1] * size


@given(size=sizes, global_batch=batches, steps=st.integers(1, 50))
def test_with_the_remainder_dropped_all_batches_are_whole(size, global_batch, steps):
    assume(global_batch <= size)
    position = Position()
    for step in range(steps):
        position, batch = next_batch(position, size, global_batch, True)
        per_epoch = size // global_batch
        assert batch == Part(step % per_epoch * global_batch, (step % per_epoch + 1) * global_batch)
        assert position == Position(step // per_epoch, batch.end)


class Leg(NamedTuple):
    """A world that trains for some steps and is then killed: what it did after its newest saved step is lost."""

    world_size: int
    keep_local: bool
    saved_steps: int
    lost_steps: int


legs = st.lists(st.builds(Leg, worlds, st.booleans(), st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=12)


@given(size=sizes, global_batch=batches, plan=legs)
def test_every_sample_once_an_epoch_whatever_worlds_follow_each_other(size, global_batch, plan):
    """Worlds of any size and batch rule, each killed after its newest checkpoint, which the next goes on from.

    `kept` is what went into the state that lives on: what was taken by steps that a kill undid does not count.
    """
    full = max(leg.world_size for leg in plan)
    saved, kept = Position(), Counter()
    while saved.epoch < 2:
        for leg in [*plan, Leg(full, False, 1, 0)]:  # the last sees to it that it ends
            batch_samples = Shard(0, leg.world_size, None, full, leg.keep_local).batch_of(global_batch)
            position = saved
            for step in range(leg.saved_steps + leg.lost_steps):
                position, batch = next_batch(position, size, batch_samples, False)
                if step < leg.saved_steps:
                    saved = position
                    for rank in range(leg.world_size):
                        part = part_of(batch, rank, leg.world_size)
                        kept.update((position.epoch, place) for place in range(*part))
    for epoch in (0, 1):
        assert [kept[epoch, place] for place in range(size)] == [1] * size


@given(size=sizes, global_batch=batches, plan=legs)
def test_with_the_remainder_dropped_no_sample_is_seen_twice_and_less_than_a_batch_left_out(size, global_batch, plan):
    assume(global_batch <= size)
    full = max(leg.world_size for leg in plan)
    position, taken = Position(), Counter()
    while position.epoch < 2:
        for leg in [*plan, Leg(full, False, 1, 0)]:
            batch_samples = Shard(0, leg.world_size, None, full, leg.keep_local).batch_of(global_batch)
            for _ in range(leg.saved_steps):
                position, batch = next_batch(position, size, batch_samples, True)
                taken.update((position.epoch, place) for place in range(*batch))
    for epoch in (0, 1):
        seen = [taken[epoch, place] for place in range(size)]
        assert max(seen) == 1
        assert seen.count(0) < global_batch
        assert 0 not in seen[: sum(seen)]  # only the epoch's end is left out


@given(global_batch=st.integers(1, 4096), world_size=worlds, missing=st.integers(0, 8))
def test_a_kept_local_batch_is_what_the_rank_had_in_the_full_world_to_a_sample(global_batch, world_size, missing):
    full = world_size + missing
    samples = Shard(0, world_size, None, full, True).batch_of(global_batch)
    assert samples == max(1, global_batch * world_size // full)
    for rank in range(world_size):
        now = part_of(Part(0, samples), rank, world_size)
        then = part_of(Part(0, global_batch), rank, full)
        assert abs((now.end - now.begin) - (then.end - then.begin)) <= 1
        if global_batch % full == 0:
            assert now.end - now.begin == then.end - then.begin == global_batch // full


@given(global_batch=batches, world_size=worlds, full=st.integers(0, 12))
def test_the_global_batch_stays_where_it_is_kept_and_in_the_full_world(global_batch, world_size, full):
    assert Shard(0, world_size, None, full, False).batch_of(global_batch) == global_batch
    assert Shard(0, world_size, None, world_size, True).batch_of(global_batch) == global_batch
    assert Shard(0, world_size, None, 0, True).batch_of(global_batch) == global_batch


@pytest.mark.parametrize(
    ("position", "drop", "expected"),
    [
        (Position(0, 0), False, (Position(0, 4), Part(0, 4))),
        (Position(0, 8), False, (Position(0, 10), Part(8, 10))),
        (Position(0, 10), False, (Position(1, 4), Part(0, 4))),
        (Position(0, 8), True, (Position(1, 4), Part(0, 4))),
        (Position(3, 6), True, (Position(3, 10), Part(6, 10))),
    ],
)
def test_batches_of_four_out_of_ten(position, drop, expected):
    assert next_batch(position, 10, 4, drop) == expected


@pytest.mark.parametrize(("global_batch", "parts"), [(60, [20, 20, 20]), (7, [2, 2, 3]), (2, [0, 1, 1])])
def test_the_ranks_local_batches_add_up_to_the_global_one(monkeypatch, global_batch, parts):
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(asarray=str))  # there is none where no TensorFlow is
    shards = [Shard(rank, 3, full_world=3) for rank in range(3)]
    made = [Dataset("x" * 60, global_batch=global_batch, shard=shard) for shard in shards]
    assert [each.local_batch for each in made] == parts
