"""Bugs planted on purpose, one at a time: a checker that finds none of them would be worth nothing."""

from __future__ import annotations

import pytest

from keepstep.core import checkpoints, cluster, decide, distrust, elastic, files, generations, membership, workers
from keepstep.core import events as e
from keepstep.core.records import Resume
from keepstep.core.values import evolve
from tests.simulation.seeds import first_violation, first_violation_of, play

ENOUGH = range(600)


def test_a_stale_generation_that_is_accepted_is_caught(monkeypatch):
    def accept_whatever(turn, event):
        if event.record.key == "generation":
            turn.set(seen_generation=0)
        cluster._take(turn, event.record, event.revision)

    monkeypatch.setitem(decide.ABSORB, e.RecordSeen, accept_whatever)
    assert "goes back from generation" in first_violation(ENOUGH)


def test_a_planned_stop_that_counts_as_a_failure_is_caught(monkeypatch):
    def charge(turn, event):
        turn.set_worker(event.worker_id, stopping=False)
        workers.on_worker_exited(turn, event)

    monkeypatch.setitem(decide.ABSORB, e.WorkerExited, charge)
    assert "planned stop" in first_violation(ENOUGH)


def test_a_resume_from_what_only_one_host_holds_is_caught(monkeypatch):
    def newest_of_any(acks, without):
        held = [held for ack in acks for held in ack.held]
        best = max(held, key=lambda each: each.step, default=None)
        return None if best is None else Resume(best.step, best.digest)

    monkeypatch.setattr(distrust, "common_held", newest_of_any)
    assert "does not hold" in first_violation(ENOUGH)


def test_a_node_that_does_not_register_under_its_new_lease_is_caught(monkeypatch):
    def under_any_lease(turn):
        seen = turn.state.cluster.nodes.get(turn.state.job.host)
        return seen is not None and seen.record.node_id == turn.state.job.node_id

    monkeypatch.setattr(membership, "is_registered", under_any_lease)
    monkeypatch.setattr(workers, "is_registered", under_any_lease)
    assert first_violation_of({"agent_frozen", "worker_killed"}, ENOUGH) != ""


def test_a_grant_of_the_newest_sealed_slab_is_caught(monkeypatch):
    def newest(turn):
        sealed = [slab for slab in turn.state.slabs if slab.seal is not None]
        newest = max(sealed, key=lambda slab: slab.seal.step, default=None)
        return turn.state.slabs[0].slab if newest is None and turn.state.slabs else newest.slab if newest else -1

    monkeypatch.setattr(checkpoints, "choose_grant", newest)
    assert first_violation(ENOUGH) != ""


def test_two_memberships_of_one_generation_are_caught(monkeypatch):
    next_number = generations._next_number

    def kept_where_members_change(turn, old):
        changed = old is not None and elastic.chosen(turn, old.members) != old.members
        return old.number if changed else next_number(turn, old)

    monkeypatch.setattr(generations, "_next_number", kept_where_members_change)
    assert "has two memberships" in first_violation(ENOUGH)


@pytest.mark.parametrize("what", ["lease", "deadline"])
def test_an_action_without_a_lease_is_caught(monkeypatch, what):
    def eternal(turn, event):
        membership.on_lease_granted(turn, event)
        if what == "deadline":
            turn.set(lease=evolve(turn.state.lease, deadline=event.deadline + 30.0))

    def forget(turn):
        """The lease is never given up, whatever its deadline."""
        if turn.state.lease is None:
            membership.keep_lease(turn)

    if what == "lease":
        monkeypatch.setattr(decide, "CONVERGE", (forget, *decide.CONVERGE[1:]))
    monkeypatch.setitem(decide.ABSORB, e.LeaseGranted, eternal)
    assert first_violation(ENOUGH) != ""


def test_a_bad_seed_is_printed_as_the_command_that_plays_it_again(monkeypatch):
    monkeypatch.setattr(distrust, "common_held", lambda acks, without: Resume(3, "what nobody holds"))
    bad = play(range(1, 4)).bad
    assert bad
    assert "keepstep simulate tests/simulation/patient.yaml --seeds 1:2 --trace" in bad[0]


def test_a_crash_says_which_seed_it_came_from(monkeypatch):
    monkeypatch.setattr(distrust, "common_held", lambda acks, without: acks[99])
    with pytest.raises(IndexError) as crash:
        play([1])
    assert crash.value.__notes__ == ["keepstep simulate tests/simulation/patient.yaml --seeds 1:2 --trace"]


def test_files_of_a_silent_script_that_are_not_put_back_are_caught(monkeypatch):
    monkeypatch.setattr(files, "wanted", lambda turn, acks: "")
    assert "goes on from no files" in first_violation(ENOUGH)


def test_last_files_that_nobody_waits_for_are_caught(monkeypatch):
    monkeypatch.setattr(files, "settled", lambda turn, durable=True: True)
    assert "is kept" in (found := first_violation(ENOUGH)) or "done, but files" in found


def test_hosts_that_go_on_from_their_own_folders_are_caught(monkeypatch):
    monkeypatch.setattr(files, "put_right", lambda turn, generation: True)
    assert "goes on from file" in first_violation(ENOUGH)
