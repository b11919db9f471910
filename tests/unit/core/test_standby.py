"""Which standby is taken, and when there is to be one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core import events as e
from keepstep.core import standby
from keepstep.core.actions import StartStandby
from keepstep.core.decide import initial_state
from keepstep.core.facts import Standby, Standbys, Worker
from keepstep.core.state import State, Turn
from keepstep.intake.policy import load_policy
from tests.unit.core.values import a_job

NOW = 1_000.0


def state(*knobs: str, **changes: object) -> State:
    begun = initial_state(a_job(), load_policy("default", knobs), NOW)
    worker = Worker("w", 1, 0, NOW, stepped=True)
    return replace(begun, workers=(worker,), standbys=Standbys(modules=("tensorflow",)), **changes)


def started(turn: Turn) -> list[str]:
    return [action.standby_id for action in turn.actions if isinstance(action, StartStandby)]


def kept(found: State) -> list[str]:
    """The standbys that are started while each that was is ready in its turn."""
    names = []
    for _ in range(5):
        turn = Turn(found, NOW)
        standby.keep(turn)
        names += started(turn)
        for each in started(turn):
            standby.on_standby_ready(turn, e.StandbyReady(each))
        found = turn.state
    assert len(names) == len(set(names))
    return names


def test_a_ready_one_is_taken_before_one_that_still_imports():
    turn = Turn(replace(state(), standbys=Standbys((Standby("a"), Standby("b", is_ready=True)))), NOW)
    assert [standby.take(turn), standby.take(turn), standby.take(turn)] == ["b", "a", ""]


def test_one_that_still_imports_is_better_than_none():
    turn = Turn(replace(state(), standbys=Standbys((Standby("a"),))), NOW)
    assert standby.take(turn) == "a"


@pytest.mark.parametrize(("wanted", "starts"), [(0, 0), (1, 1), (3, 3)])
def test_there_are_as_many_as_the_policy_says(wanted, starts):
    assert len(kept(state(f"launch.standby={wanted}"))) == starts


def test_they_are_started_one_after_the_other():
    turn = Turn(state("launch.standby=2"), NOW)
    standby.keep(turn)
    standby.keep(turn)
    [first] = started(turn)
    standby.on_standby_ready(turn, e.StandbyReady(first))
    standby.keep(turn)
    assert len(started(turn)) == 2


@pytest.mark.parametrize(("policy", "starts"), [(0, 0), (1, 2), (2, 3)])
def test_one_more_waits_after_the_first_restart(policy, starts):
    begun = state(f"launch.standby={policy}")
    turn = Turn(replace(begun, standbys=replace(begun.standbys, waiting=(Standby("a"),), starts=1)), NOW)
    assert standby.take(turn) == "a"
    assert len(kept(turn.state)) == starts


def test_the_first_start_is_no_restart():
    turn = Turn(state(), NOW)
    assert standby.take(turn) == ""
    assert len(kept(turn.state)) == 1


def test_a_script_that_imports_nothing_large_needs_none():
    turn = Turn(replace(state(), standbys=Standbys()), NOW)
    standby.keep(turn)
    assert started(turn) == []
    standby.on_worker_imported(turn, e.WorkerImported("w", "tensorflow"))
    standby.on_worker_imported(turn, e.WorkerImported("w", "keras"))
    standby.on_worker_imported(turn, e.WorkerImported("w", "keras"))
    assert turn.state.standbys.modules == ("tensorflow", "keras")
    standby.keep(turn)
    assert len(started(turn)) == 1
