"""How often a checkpoint is due, and which save is not begun any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core import pace
from keepstep.core.actions import Measure, Report
from keepstep.core.causes import FailureCause
from keepstep.core.facts import Lease, Worker
from keepstep.core.failures import Failure
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.records import LeaderRecord, Phase, RequestRecord
from keepstep.core.state import Turn
from keepstep.core.view import Seen
from tests.unit.core.values import a_generation, a_turn


def a_turn_after(*saves: float, policy: Policy | None = None) -> Turn:
    turn = a_turn(policy)
    for seconds in saves:
        pace.saved(turn, seconds)
    return turn


def interval(turn: Turn, *failed_at: float) -> float | None:
    return pace.interval_s(turn, a_generation(failed_at=failed_at))


def test_young_s_formula():
    """Saves of 2 s that cost a tenth of it, three failures in an hour: sqrt(2 * 0.2 s * 1200 s)."""
    turn = a_turn_after(2.0)
    assert interval(turn, turn.now - 3600.0, 900.0, 950.0, 990.0) == pytest.approx(21.9, abs=0.01)
    assert interval(turn) == interval(turn, turn.now) == pytest.approx(185.9, abs=0.1)


def test_a_failure_counts_less_the_longer_it_is_ago():
    turn = a_turn_after(2.0)
    found = [interval(turn, turn.now - ago, turn.now - ago + 20.0) for ago in (100.0, 1e4, 1e6)]
    assert found == sorted(found) and found[0] < found[1] < found[2] == interval(turn)


def test_the_newest_failures_are_reckoned_with():
    turn, generation = a_turn(), a_generation()
    assert pace.between_s(turn, generation) == pace.UNHURT_S
    for at in (0.0, *[turn.now - 60.0 + 20.0 * n for n in range(4)]):
        root = Failure(FailureCause.KILLED, "algo-1", at) if generation.failed_at else None
        generation = a_generation(failed_at=pace.failed(turn, generation, root))
    assert generation.failed_at == (turn.now - 60.0, turn.now - 40.0, turn.now - 20.0, turn.now)
    assert pace.between_s(turn, generation) == 20.0


def test_a_planned_restart_is_no_failure():
    turn = a_turn()
    assert pace.failed(turn, a_generation(failed_at=(1.0, 2.0)), None) == (1.0, 2.0)


def test_an_unmeasured_save_is_due_soon():
    assert interval(a_turn()) == pace.AUTO_MIN_S


def test_a_former_leader_s_measure_is_taken_over():
    assert pace.save_s(a_turn(), a_generation(save_s=4.0)) == 4.0
    assert pace.save_s(a_turn_after(1.0), a_generation(save_s=4.0)) == 1.0


def test_one_slow_save_changes_little():
    assert pace.save_s(a_turn_after(1.0, 1.1, 60.0), a_generation()) == 1.1


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=9), st.integers(0, 9))
def test_saves_never_follow_each_other_without_a_break(saves, failures):
    turn = a_turn_after(*saves)
    found = interval(turn, *[turn.now - 1.0] * failures)
    assert found >= max(pace.AUTO_MIN_S, 2 * pace.save_s(turn, a_generation()))


@given(st.floats(0.001, 1e4), st.integers(0, 9))
def test_more_failures_never_mean_fewer_checkpoints(seconds, failures):
    turn = a_turn_after(seconds)
    assert interval(turn, *[turn.now] * (failures + 1)) <= interval(turn, *[turn.now] * failures)


def test_the_policy_s_word_holds():
    def of(every: str) -> float | None:
        policy = Policy.model_validate({"checkpoint": {"every": every}})
        return pace.interval_s(a_turn_after(9.0, policy=policy), a_generation())

    assert of("2min") == 120.0
    assert of("500 steps") is None


def interrupted(turn: Turn, left_s: float) -> Turn:
    record = RequestRecord("algo-2", "sigterm", turn.now, turn.now + left_s)
    turn.set_cluster(requests={"algo-2": Seen(record, 1)})
    return turn


def test_a_save_is_too_late_where_not_even_the_shortest_one_fitted():
    assert pace.too_late(interrupted(a_turn_after(9.0, 30.0), 10.0), a_generation()) == ""
    told = pace.too_late(interrupted(a_turn_after(9.0, 30.0), 8.0), a_generation())
    assert told == "a save takes 9.0 s and 8.0 s are left"


def test_an_unmeasured_save_is_tried():
    assert pace.too_late(interrupted(a_turn(), 1.0), a_generation()) == ""


def test_without_an_interruption_nothing_is_too_late():
    assert pace.too_late(a_turn_after(1e6), a_generation()) == ""


def a_leading_turn(policy: Policy | None = None) -> Turn:
    turn = a_turn(policy)
    turn.set(lease=Lease(7, turn.now + 5.0))
    turn.set_cluster(leader=Seen(LeaderRecord("algo-1", "one", 7), 1))
    assert turn.leads
    return turn


def told(turn: Turn) -> list[str]:
    """What is told of the interval from now on."""
    before = len(turn.notes)
    pace.report(turn, a_generation())
    return [note.detail for note in turn.notes[before:] if note.reason is Reason.CADENCE_CHANGED]


def test_an_interval_of_keepstep_s_own_is_told_and_again_where_it_changes():
    turn = a_leading_turn()
    assert told(turn) == [], "nothing was measured yet"
    pace.saved(turn, 2.0)
    assert told(turn) == ["a checkpoint every 186 s, each takes 2.0 s"]
    pace.saved(turn, 2.1)
    assert told(turn) == []
    for _ in range(5):
        pace.saved(turn, 8.0)
    assert told(turn) == ["a checkpoint every 372 s, each takes 8.0 s"]


def test_the_policy_s_own_interval_is_no_news():
    turn = a_leading_turn(Policy.model_validate({"checkpoint": {"every": "2min"}}))
    pace.saved(turn, 2.0)
    assert told(turn) == []


def committable(turn: Turn, after_s: float = 0.0) -> list[float]:
    """What is told, so many seconds later, of whether an interruption would leave the time for a save."""
    before, turn.now = len(turn.actions), turn.now + after_s
    pace.tell_committable(turn)
    return [action.value for action in turn.actions[before:] if action == Report(Measure.COMMITTABLE, action.value)]


def a_training_turn(*saves: float) -> Turn:
    """One whose steps take a second, with a grace of ten."""
    turn = a_turn_after(*saves, policy=Policy.model_validate({"interruption": {"grace": "10s"}}))
    turn.set_cluster(generation=Seen(a_generation(phase=Phase.READY), 1))
    turn.set(workers=(Worker("algo-1.0", 3, 0, 0.0, completed=9, step_s=1.0),))
    return turn


def test_whether_a_save_would_be_in_time_is_told_where_it_changes():
    turn = a_training_turn()
    assert committable(turn) == [], "nothing is known yet"
    pace.saved(turn, 9.0)
    assert committable(turn) == [1.0]
    assert committable(turn) == []
    turn.set_worker("algo-1.0", step_s=1.5)
    assert committable(turn) == [0.0]
    for _ in range(3):
        pace.saved(turn, 2.0)
    assert committable(turn) == [1.0]


@pytest.mark.parametrize("saves", [(), (2.0, 2.0)])
def test_a_save_that_goes_on_for_too_long_is_told_while_it_does(saves):
    turn = a_training_turn(*saves)
    assert committable(turn) == [1.0] * bool(saves)
    turn.set_store(saving_since=turn.now)
    assert committable(turn, after_s=8.9) == []
    assert turn.decision().state.wake_at == pytest.approx(turn.now + 0.1)
    assert committable(turn, after_s=0.1) == [0.0]
    assert committable(turn, after_s=50.0) == []
    turn.set_store(saving_since=None)
    assert committable(turn) == [1.0] * bool(saves)
