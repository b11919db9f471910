"""When a worker counts as standing still, and which of those that do hold the others up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core import workers
from keepstep.core.decide import initial_state
from keepstep.core.events import FirstStepCompleted, StacksCollected, StepsSampled
from keepstep.core.facts import Worker
from keepstep.core.hang import culprits, deadline_s, on_stacks_collected, tell
from keepstep.core.policy import Hang
from keepstep.core.stalls import Activity, Stall
from keepstep.core.state import Turn
from keepstep.intake.policy import load_policy
from tests.unit.core.values import a_job

DEFAULT = Hang()


@pytest.mark.parametrize(
    ("activity", "slow_s", "wanted"),
    [
        (Activity.STEP, 0.0, 60.0),
        (Activity.STEP, 0.5, 60.0),
        (Activity.STEP, 20.0, 200.0),
        (Activity.START, 0.0, 1200.0),
        (Activity.FIRST_STEP, 0.0, 1200.0),
        (Activity.FIRST_STEP, 200.0, 2000.0),
        (Activity.EPOCH, 0.5, 600.0),
        (Activity.PAUSE, 0.5, 1200.0),
        (Activity.EVALUATION, 0.5, 1200.0),
        (Activity.FINISHED, 0.5, None),
    ],
)
def test_the_deadline_is_learnt_from_steps_and_never_below_its_floor(activity, slow_s, wanted):
    assert deadline_s(DEFAULT, activity, slow_s) == wanted


def test_a_fixed_deadline_is_for_steps():
    policy = load_policy("default", ["hang.deadline=5min"]).hang
    assert deadline_s(policy, Activity.STEP, 100.0) == 300.0
    assert deadline_s(policy, Activity.EVALUATION, 100.0) == 1200.0


def test_off_judges_nobody():
    policy = load_policy("default", ["hang.deadline=off"]).hang
    assert {deadline_s(policy, each, 1.0) for each in Activity} == {None}


def waits(entered: int = 10, completed: int = 9, **found: object) -> Stall:
    """A worker in a step, waiting for the others."""
    return Stall(Activity.STEP, 1.0, entered, completed, **{"in_step": True, "calls": ("train.py:50 main",), **found})


@pytest.mark.parametrize(
    ("stalls", "named"),
    [
        ([waits(), waits(9, 9)], [1]),  # in a callback: it has not entered the step
        ([waits(9, 8), waits(), waits()], [0]),  # a step behind
        ([waits(), waits(process="T")], [1]),  # SIGSTOP
        ([waits(process="D"), waits()], [0]),  # the kernel does not let it go
        ([waits(9, 9), waits(process="T")], [1]),  # a stopped one tells more than one that is behind
        ([waits(), Stall(Activity.START, 1.0, joined=False)], [1]),
        ([waits(ready=True), waits(ready=False), waits(ready=True)], [1]),  # its own part of the step is not done
        ([waits(ready=False), waits(ready=False), waits(in_step=False)], [2]),  # nobody's is
        ([waits(ready=None), waits(ready=False), waits(spins=True)], [2]),  # nothing to compare it with
        ([waits(9, 9), waits(ready=True), waits(ready=False)], [0]),  # who has not entered the step is behind all
        ([waits(), waits(in_step=False)], [1]),  # its main thread is in the script: a lock, a generator
        ([waits(), waits(calls=("train.py:50 main", "train.py:7 load"))], [1]),  # a thread of its data
        ([waits(), waits(spins=True)], [1]),
        ([waits(), waits(), waits()], [0, 1, 2]),  # nothing tells them apart
        ([waits()], [0]),
        ([], []),
    ],
)
def test_who_is_waited_for_is_named(stalls, named):
    found = culprits(stalls)
    assert [rank for rank, stall in enumerate(stalls) if any(each is stall for each in found)] == named


def test_what_is_told_says_where_it_stands():
    stall = waits(process="T", calls=("train.py:30 wait", "data.py:7 load"))
    assert tell(stall) == "step, step 10 entered, stopped by a signal, in train.py:30 wait; data.py:7 load"


@pytest.mark.parametrize(("ready", "wanted"), [(True, ", gradients ready"), (False, ", gradients not ready")])
def test_what_is_told_says_whether_gradients_are_ready(ready, wanted):
    assert tell(waits(ready=ready, calls=())) == f"step, step 10 entered{wanted}"


def test_of_a_hosts_ranks_the_one_is_told_that_the_others_wait_for():
    state = replace(initial_state(a_job(), load_policy("default"), 1.0), workers=(Worker("w", 1, 0, 1.0),))
    turn, first, last = Turn(state, 60.0), waits(rank=0), waits(9, 9, rank=3)
    on_stacks_collected(turn, StacksCollected("stacks:w", "w", first, (waits(rank=1), last)))
    assert turn.state.workers[0].stall == last


def test_a_host_is_in_training_where_one_of_its_ranks_is():
    state = replace(initial_state(a_job(), load_policy("default"), 1.0), workers=(Worker("w", 1, 0, 1.0),))
    turn, late = Turn(state, 60.0), Stall(Activity.START, 1.0, joined=False, rank=1)
    on_stacks_collected(turn, StacksCollected("stacks:w", "w", waits(rank=0), (late,)))
    assert turn.state.workers[0].stall == replace(late, joined=True)


def test_the_first_step_is_no_measure_of_the_others():
    state = replace(initial_state(a_job(), load_policy("default"), 1.0), workers=(Worker("w", 1, 0, 1.0),))
    turn, seen = Turn(state, 60.0), []
    workers.on_first_step(turn, FirstStepCompleted("w", 8, 50.0))
    for sample in (
        StepsSampled("w", 8, 8, step_s=40.0),  # traced
        StepsSampled("w", 10, 9, step_s=0.5),
        StepsSampled("w", 20, 19, step_s=0.25),
    ):
        workers.on_steps_sampled(turn, sample)
        seen.append(turn.state.workers[0].slow_s)
    assert seen == [0.0, 0.5, 0.49]
