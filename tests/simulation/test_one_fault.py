"""Jobs to which one thing happens, or nothing: what they cost and how they end."""

from __future__ import annotations

import pytest

from keepstep.core.policy import Policy
from keepstep.core.records import Phase
from keepstep.simulation.faults import FAULTS
from keepstep.simulation.run import World
from tests.simulation.seeds import patient

LAST_STEP = 40
FAULT = {fault.name: fault for fault in FAULTS}


def codes(world: World) -> set[int | None]:
    return {host.exit_code for host in world.hosts.values()}


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_a_job_to_which_nothing_happens_is_done_and_restarts_nothing(hosts, silent):
    world = World(1, Policy(), hosts, LAST_STEP)
    world.silent = silent
    world.play(())
    assert world.checkers.violations + world.checkers.at_the_end() == []
    assert codes(world) == {0}
    end = world.coordinator.history[-1]
    assert (end.phase, end.number, end.restarts, end.ledger) == (Phase.ENDED, 1, 0, ())
    assert world.checkers.unsaved() == []
    assert (world.store.head is None) == silent and bool(world.store.files) == silent


def test_a_bug_of_the_script_ends_the_job_with_its_code_after_three_tries():
    world = World(2, Policy(), 2, LAST_STEP)
    world.bug_at_step = 12
    world.play(())
    assert world.checkers.violations == []
    assert codes(world) == {1}
    end = world.coordinator.history[-1]
    assert (end.restarts, end.root.error_type, end.root.step) == (2, "ValueError", 12)


@pytest.mark.parametrize("at", [0.5, 3.0, 9.0, 17.0])
def test_a_planned_stop_costs_nothing_and_the_next_run_goes_on_from_it(at):
    world = World(3, Policy(), 2, LAST_STEP)
    world.clock.after(at, lambda: [host.interrupt() for host in world.hosts.values()])
    world.interrupted_at = world.clock.now + at
    world.play(())
    assert world.checkers.violations == []
    assert codes(world) == {143}
    saved = world.store.head.step if world.store.head is not None else 0
    if world.coordinator.history:
        assert (world.coordinator.history[-1].restarts, world.coordinator.history[-1].ledger) == (0, ())
    again = World(4, Policy(), 2, LAST_STEP)
    again.store = world.store
    again.play(())
    assert again.checkers.violations + again.checkers.at_the_end() == []
    first = next(record for record in again.coordinator.history if record.phase is Phase.READY)
    assert (first.resume.step if first.resume is not None else 0) == saved


@pytest.mark.parametrize("name", sorted(FAULT))
def test_a_job_outlives_this_fault_alone(name):
    """Again and again the same kind of fault, until it fired at least once."""
    for seed in range(40):
        world = World(seed, patient(), 2, LAST_STEP)
        world.play((FAULT[name],))
        assert world.checkers.violations + world.checkers.at_the_end() == []
        if world.fired[name]:
            return
    pytest.fail(f"{name} never fired")
