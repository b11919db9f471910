"""The arithmetic of positions: each sample of an epoch once, whatever the world size and whenever it changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keepstep_worker.dataset import Part, Position, next_batch, part_of

sizes = st.integers(1, 200)
batches = st.integers(1, 64)
worlds = st.integers(1, 9)


@given(begin=st.integers(0, 50), size=st.integers(0, 100), count=worlds)
def test_parts_make_up_the_batch_in_order_and_differ_by_one_at_most(begin, size, count):
    parts = [part_of(Part(begin, begin + size), index, count) for index in range(count)]
    assert [place for part in parts for place in range(*part)] == list(range(begin, begin + size))
    lengths = [part.end - part.begin for part in parts]
    assert max(lengths) - min(lengths) <= 1


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
