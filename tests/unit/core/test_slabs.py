"""As many slabs as there is memory for, and none where there is too little."""

from __future__ import annotations

import pytest

from keepstep.core import checkpoints
from keepstep.core.actions import AllocateSlabs, HandSlabs
from keepstep.core.events import LayoutAnnounced, SlabsLacking
from keepstep.core.facts import Slab, Worker
from keepstep.core.reasons import Reason
from keepstep.core.state import Turn
from tests.unit.core.values import a_turn

SIZE = 1000


def a_turn_with_a_worker(*slabs: Slab) -> Turn:
    turn = a_turn()
    turn.set(workers=(Worker("one.0", 3, 0, 0.0),), slabs=slabs, next_slab=len(slabs))
    return turn


def announced(turn: Turn, room_bytes: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slabs that are made, and those that the worker is told of."""
    checkpoints.on_layout_announced(turn, LayoutAnnounced("one.0", 5, SIZE, room_bytes))
    made = [action.slabs for action in turn.actions if isinstance(action, AllocateSlabs)]
    return made[0] if made else (), handed(turn)


def handed(turn: Turn) -> tuple[int, ...]:
    hands = [action for action in turn.actions if isinstance(action, HandSlabs)]
    assert all(action.layout == 5 for action in hands)
    return hands[-1].slabs


def told(turn: Turn) -> list[str]:
    return [note.detail for note in turn.notes if note.reason is Reason.SLABS_LACKING]


@pytest.mark.parametrize("room_bytes", [None, 4 * SIZE, 10**12])
def test_three_where_there_is_room(room_bytes):
    turn = a_turn_with_a_worker()
    assert announced(turn, room_bytes) == ((0, 1, 2), (0, 1, 2))
    assert turn.state.saves and told(turn) == []


def test_two_where_there_is_room_for_two_and_it_is_said_what_that_costs():
    turn = a_turn_with_a_worker()
    assert announced(turn, 3 * SIZE) == ((0, 1), (0, 1))
    assert turn.state.saves
    (text,) = told(turn)
    assert text == (
        "memory for 2 snapshots of 1000 bytes, 3 are wanted: no snapshot is taken while one is uploaded; "
        "3000 bytes can be had"
    )


@pytest.mark.parametrize("room_bytes", [0, SIZE, 2 * SIZE])
def test_none_where_there_is_not_even_room_for_two(room_bytes):
    turn = a_turn_with_a_worker()
    assert announced(turn, room_bytes) == ((), ())
    assert not turn.state.saves
    assert "no snapshots are taken" in told(turn)[0]


def test_those_that_are_there_count_and_take_no_room():
    turn = a_turn_with_a_worker(Slab(0, SIZE))
    assert announced(turn, 2 * SIZE) == ((1,), (0, 1))
    turn = a_turn_with_a_worker(Slab(0, SIZE), Slab(1, SIZE), Slab(2, SIZE))
    assert announced(turn, 0) == ((), (0, 1, 2))
    turn = a_turn_with_a_worker(Slab(0, SIZE - 1), Slab(1, SIZE))
    assert announced(turn, 10 * SIZE) == ((2, 3), (1, 2, 3))


def test_what_could_not_be_had_after_all_is_handed_to_nobody():
    turn = a_turn_with_a_worker()
    announced(turn, None)
    checkpoints.on_slabs_lacking(turn, SlabsLacking((2,), "no space left"))
    assert handed(turn) == (0, 1) and turn.state.saves
    checkpoints.on_slabs_lacking(turn, SlabsLacking((1,), "no space left"))
    assert handed(turn) == () and not turn.state.saves
    assert [slab.slab for slab in turn.state.slabs] == [0]


def test_a_later_worker_may_find_more_room():
    turn = a_turn_with_a_worker()
    announced(turn, 0)
    assert announced(turn, 10 * SIZE) == ((0, 1, 2), (0, 1, 2))
    assert turn.state.saves
