"""What all members hold, and where the next world starts from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.distrust import choose_resume
from keepstep.core.events import Head
from keepstep.core.facts import Recovery
from keepstep.core.reasons import Reason
from keepstep.core.records import Resume
from keepstep.core.view import common_held
from keepstep.core.workers import recovery_phases
from tests.unit.core.values import a_turn, an_ack

holdings = st.lists(st.tuples(st.integers(1, 6), st.sampled_from("ab")), max_size=5)


@pytest.mark.parametrize(
    ("acks", "resume"),
    [
        ([], None),
        ([an_ack("algo-1")], None),
        ([an_ack("algo-1", (8, "a"))], Resume(8, "a")),
        ([an_ack("algo-1", (8, "a"), (16, "b")), an_ack("algo-2", (8, "a"))], Resume(8, "a")),
        ([an_ack("algo-1", (8, "a"), (16, "b")), an_ack("algo-2", (8, "a"), (16, "c"))], Resume(8, "a")),
        ([an_ack("algo-1", (8, "a")), an_ack("algo-2", (16, "b"))], None),
        ([an_ack("algo-1", (8, "a")), an_ack("algo-2")], None),
    ],
)
def test_the_newest_snapshot_that_all_hold_is_the_one(acks, resume):
    assert common_held(acks) == resume


@given(st.lists(holdings, min_size=1, max_size=4))
def test_nobody_is_to_resume_what_it_does_not_hold(held):
    acks = [an_ack(f"algo-{n}", *each) for n, each in enumerate(held)]
    found = common_held(acks)
    common = set.intersection(*(set(each) for each in held))
    if found is None:
        assert common == set()
    else:
        assert (found.step, found.digest) in common
        assert found.step == max(step for step, _ in common)


@pytest.mark.parametrize(
    ("held", "head", "wanted"),
    [
        (None, None, (None, Reason.FRESH_START)),
        (None, Head(1, 0, "", ""), (None, Reason.FRESH_START)),
        (Resume(8, "a"), None, (Resume(8, "a"), Reason.RESUME_FROM_SLABS)),
        (Resume(8, "a"), Head(1, 8, "a", "m"), (Resume(8, "a"), Reason.RESUME_FROM_SLABS)),
        (Resume(8, "a"), Head(1, 5, "x", "m"), (Resume(8, "a"), Reason.RESUME_FROM_SLABS)),
        (Resume(8, "a"), Head(1, 9, "x", "m"), (Resume(9, "x", "m"), Reason.RESUME_FROM_STORE)),
        (None, Head(1, 9, "x", "m"), (Resume(9, "x", "m"), Reason.RESUME_FROM_STORE)),
    ],
)
def test_the_newest_state_there_is_wins(held, head, wanted):
    turn = a_turn()
    turn.set_store(head=head)
    assert choose_resume(turn, held) == wanted


marks = st.floats(0, 1e6)


@given(marks, marks, marks, marks, marks, marks, marks)
def test_the_phases_of_a_recovery_add_up(fault, learnt, stopped, ready, joined, restored, first_step):
    phases = recovery_phases(Recovery(fault, learnt, stopped, ready, joined, restored), first_step)
    seconds = dict(phases)
    assert list(seconds) == ["detect", "stop", "agree", "start", "restore", "first_step", "total"]
    assert all(value >= 0.0 for value in seconds.values())
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)
    assert total == max(fault, learnt, stopped, ready, joined, restored, first_step) - fault


def test_a_phase_that_was_never_reached_takes_no_time():
    phases = dict(recovery_phases(Recovery(10.0, 10.5, 11.0, 12.0, 14.0), 15.0))
    assert (phases["start"], phases["restore"], phases["first_step"], phases["total"]) == (2.0, 0.0, 1.0, 5.0)
