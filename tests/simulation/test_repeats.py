"""A step is done again on other hosts: what is found in whole worlds, and that it costs no committed step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from keepstep.core.fingerprints import ANY_STEP
from keepstep.core.policy import Policy
from keepstep.core.records import GenerationRecord, Phase
from keepstep.simulation.run import World
from tests.simulation.seeds import patient

KNOBS = {"health": {"repeat": "20s"}, "checkpoint": {"every": "8 steps", "snapshot_every": "4 steps"}}
LAST_STEP = 160


def play(hosts: int, wrong: str = "", **knobs: object) -> World:
    world = World(2, Policy.model_validate({**KNOBS, **knobs}), hosts, LAST_STEP)
    world.wrong = {wrong} - {""}
    world.play(())
    assert world.checkers.violations + world.checkers.at_the_end() == []
    assert world.checkers.unsaved() == []
    return world


def ready(world: World) -> list[GenerationRecord]:
    """The first record of each generation that became ready."""
    found = {}
    for record in world.coordinator.history:
        if record.phase is Phase.READY:
            found.setdefault(record.number, record)
    return list(found.values())


@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_steps_are_done_again_and_all_is_well(hosts):
    world = play(hosts)
    assert world.reasons["step_repeated"] >= 2
    assert world.reasons["silent_corruption"] == world.reasons["repeat_differs"] == 0
    worlds = ready(world)
    end = world.coordinator.history[-1]
    assert (end.exit_code, end.restarts, end.ledger) == (0, 0, ())
    for before, after in pairwise(worlds):
        assert [m.host for m in after.members] == [m.host for m in (*before.members[-1:], *before.members[:-1])]
        assert after.resume.manifest  # what is a rank's own comes from the store, as the rank is on another host
        assert after.resume.step == after.durable_step == after.repeat.step - 1
        assert after.lost_steps > 0
        assert after.repeat.moved != ANY_STEP


@pytest.mark.parametrize("hosts", [3, 5])
@pytest.mark.parametrize("wrong", ["algo-1", "algo-3"])
def test_the_host_that_is_wrong_is_named(hosts, wrong):
    told = []
    world = World(2, Policy.model_validate(KNOBS), hosts, LAST_STEP)
    world.wrong = {wrong}
    world.trace = lambda host, event, decision: told.extend(decision.notes)
    world.play(())
    assert world.checkers.violations + world.checkers.at_the_end() == []
    found = [note.detail for note in told if note.reason.value == "silent_corruption"]
    assert len(found) >= 2
    assert {detail.split(": ")[1].split(" computed")[0] for detail in found} == {wrong}
    assert world.reasons["step_repeated"] == 0


def test_of_two_hosts_both_are_named_after_a_third_time():
    world = play(2, "algo-2")
    assert world.reasons["repeat_differs"] == world.reasons["silent_corruption"] >= 1


def test_who_is_wrong_is_cordoned_where_the_policy_goes_on_without_it():
    rules = [{"cause": "gpu_fault", "respond": "restart"}, {"cause": "any", "respond": "restart"}]
    world = play(4, "algo-2", failures=rules, elastic={"spares": 1})
    assert world.reasons["silent_corruption"] >= 1
    before, last = ready(world)[-2:] if world.reasons["step_repeated"] == 0 else ready(world)[1:3]
    assert "algo-2" in [member.host for member in before.members]
    assert "algo-2" not in [member.host for member in last.members]
    assert last.resume.step == before.resume.step  # nothing that it had part in since the checkpoint is gone on from
    assert "algo-2" in {key.removeprefix("cordons/") for key in world.coordinator.kept}


def test_it_ends_the_job_where_the_policy_says_so():
    checkpoint = {**KNOBS["checkpoint"], "divergence": "stop"}
    world = World(2, Policy.model_validate({**KNOBS, "checkpoint": checkpoint}), 3, LAST_STEP)
    world.wrong = {"algo-3"}
    world.play(())
    assert world.checkers.violations == []
    end = world.coordinator.history[-1]
    assert end.exit_code == 76
    assert "algo-3 computed something else" in end.verdict
    assert f"saved up to step {end.durable_step}" in end.verdict


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_repeats_among_all_other_faults(first):
    """Whatever ends a generation meanwhile: the job goes on from what is committed, and ends."""
    repeated = 0
    policy = patient().model_copy(update={"health": Policy.model_validate({"health": {"repeat": "5s"}}).health})
    for seed in range(first, first + 12):
        world = World(seed, policy, 2 + seed % 3, 100)
        world.silent = False
        world.play()
        assert world.checkers.violations + world.checkers.at_the_end() == [], seed
        repeated += world.reasons["step_repeated"]
        assert world.reasons["silent_corruption"] == 0, seed
    assert repeated
