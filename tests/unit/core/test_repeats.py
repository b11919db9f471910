"""Which host is to blame when a step comes out otherwise, and what a world goes on from once ranks were moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core import elastic
from keepstep.core.distrust import held_by_all
from keepstep.core.events import Head
from keepstep.core.fingerprints import ANY_STEP, Doing, Repeat, describe, differing
from keepstep.core.launch import plan_worker
from keepstep.core.policy import Policy
from keepstep.core.records import Member, NodeRecord, Resume
from keepstep.core.repeats import at_start, begun, beside, suspects
from keepstep.core.view import Seen, table_of
from tests.unit.core.values import a_failure, a_generation, a_job, a_turn, an_ack

EVERY_6H = Policy.model_validate({"health": {"repeat": "6h"}})


def done(hosts: int, times: int, wrong: dict[tuple[str, int], str] | None = None) -> tuple[Doing, ...]:
    """A step that was done so often, each time a host further on; `wrong` is what (host, time) computes instead."""
    found = []
    for time in range(times):
        names = tuple(f"algo-{(rank - time) % hosts + 1}" for rank in range(hosts))
        values = tuple((wrong or {}).get((name, time), f"right {rank}") for rank, name in enumerate(names))
        found.append(Doing(names, values))
    return tuple(found)


@given(st.integers(2, 9), st.integers(1, 3))
def test_nobody_is_to_blame_where_nothing_differs(hosts, times):
    doings = done(hosts, times)
    assert (differing(doings), suspects(doings), describe(doings)) == ((), (), "")


@given(st.data(), st.integers(3, 9), st.integers(2, 3))
def test_of_three_hosts_and_more_the_one_that_is_always_wrong_is_named(data, hosts, times):
    bad = f"algo-{data.draw(st.integers(1, hosts))}"
    doings = done(hosts, times, {(bad, time): f"wrong {data.draw(st.integers(0, 1))}" for time in range(times)})
    assert suspects(doings) == (bad,)
    assert len(differing(doings)) == times


@given(st.data(), st.integers(2, 9))
def test_who_was_wrong_but_once_is_named_after_three_times(data, hosts):
    bad, when = f"algo-{data.draw(st.integers(1, hosts))}", data.draw(st.integers(0, 2))
    doings = done(hosts, 3, {(bad, when): "wrong"})
    assert suspects(doings) == (bad,)
    if when < 2:
        assert len(suspects(doings[:2])) == 2  # one word against another


def test_of_two_hosts_that_speak_against_each_other_both_are_named():
    always = {("algo-2", time): f"wrong {time % 2}" for time in range(3)}
    assert suspects(done(2, 2, always)) == suspects(done(2, 3, always)) == ("algo-1", "algo-2")


def test_of_two_hosts_the_one_that_is_not_even_of_its_own_opinion_is_named():
    assert suspects(done(2, 3, {("algo-2", time): f"wrong {time}" for time in range(3)})) == ("algo-2",)


def test_two_bad_hosts_are_named_with_whom_they_were_beside():
    wrong = {(host, time): f"wrong {host}" for host in ("algo-1", "algo-4") for time in range(3)}
    assert {"algo-1", "algo-4"} <= set(suspects(done(9, 3, wrong)))


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_a_step_that_is_another_one_each_time_speaks_against_nobody(hosts):
    anew = {(f"algo-{host}", time): f"{host} {time}" for host in range(1, hosts + 1) for time in range(3)}
    assert suspects(done(hosts, 3, anew)) == ()


def test_data_of_the_hosts_own_speak_against_nobody():
    own = {(f"algo-{host}", time): f"of {host}" for host in range(1, 5) for time in range(3)}
    assert suspects(done(4, 2, own)) == suspects(done(4, 3, own)) == ()


def test_what_differs_is_told_by_rank():
    doings = done(3, 2, {("algo-1", 0): "wrong"})
    assert describe(doings) == "rank 0 wrong on algo-1, right 0 on algo-3"


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "step"),
    [
        (EVERY_6H, {}, 49),
        (Policy(), {}, 0),
        (EVERY_6H, {"repeat": Repeat(at=1.0)}, 0),
        (EVERY_6H, {"repeat": Repeat(why="no op determinism")}, 0),
        (EVERY_6H, {"members": (Member("algo-1", "one"),)}, 0),
        (EVERY_6H, {"distrusted": (Resume(48, "d48"),)}, 0),
        (EVERY_6H, {"weights": (("algo-1", 900), ("algo-2", 1100))}, 0),
    ],
)
def test_the_step_behind_a_checkpoint_is_looked_at_where_a_repeat_is_due(policy, changes, step):
    turn = a_turn(policy, now=21_600.0)
    assert beside(turn, a_generation(**changes), 48).step == step


def test_time_counts_from_the_first_generation_and_goes_on_behind_an_etcd_that_was_lost():
    turn = a_turn(EVERY_6H, now=500.0)
    assert begun(turn, Repeat()) == Repeat(at=500.0)
    assert begun(turn, Repeat(at=70.0, step=9, doings=done(2, 1), moved=12)) == Repeat(at=70.0, moved=12)
    assert begun(a_turn(now=500.0), Repeat()) == Repeat()


@pytest.mark.parametrize(("policy", "told"), [(Policy(), None), (EVERY_6H, "on")])
def test_workers_look_at_steps_only_where_the_policy_asks_for_it(policy, told):
    _, environment = plan_worker(a_job(), table_of(a_generation(), 2), 0, policy)
    assert dict(environment).get("KEEPSTEP_FINGERPRINT") == told


# --- what is gone on from --------------------------------------------------------------------------------------------

HELD = (Resume(12, "d12"), [an_ack("algo-1", (12, "d12")), an_ack("algo-2", (12, "d12"))])


@pytest.mark.parametrize(
    ("moved", "store", "usable"),
    [
        (0, {}, True),
        (11, {}, True),
        (12, {}, False),
        (ANY_STEP, {}, False),
        (12, {"head_known": False, "head": None}, False),  # it is asked first
        (12, {"available": False}, True),
        (12, {"head": None}, True),
        (12, {"head": Head(3, 0, "", "")}, True),
    ],
)
def test_snapshots_of_ranks_that_were_moved_since_are_not_gone_on_from(moved, store, usable):
    turn, (newest, acks) = a_turn(), HELD
    turn.set_store(**{"head_known": True, "head": Head(3, 8, "d8", "m8"), **store})
    assert held_by_all(turn, a_generation(repeat=Repeat(moved=moved)), acks) == (newest if usable else None)


@pytest.mark.parametrize(
    ("resume", "root", "step"),
    [
        (Resume(8, "d8", "m8"), None, 9),
        (Resume(8, "d8"), None, 0),
        (Resume(4, "d4", "m4"), None, 0),
        (Resume(8, "d8", "m8"), a_failure(), 0),
        (None, None, 0),
    ],
)
def test_a_step_is_done_again_from_the_very_checkpoint_and_where_nothing_failed(resume, root, step):
    generation = a_generation(repeat=Repeat(step=9, doings=done(2, 1), moved=ANY_STEP))
    repeat = at_start(generation, resume, root, [an_ack("algo-1", (12, "d"), completed=14), an_ack("algo-2")])
    assert repeat == Repeat(step=step, doings=done(2, 1) if step else (), moved=14)


def test_members_who_all_stay_keep_their_ranks():
    turn = a_turn(hosts=("algo-1", "algo-2", "algo-3"))
    nodes = {h: Seen(NodeRecord(h, f"node {h}", "10.0.0.1", 1), 1) for h in ("algo-1", "algo-2", "algo-3")}
    turn.set_cluster(nodes=nodes)
    moved = tuple(Member(host, "of an older boot") for host in ("algo-3", "algo-1", "algo-2"))
    assert [member.host for member in elastic.chosen(turn, moved)] == ["algo-3", "algo-1", "algo-2"]
    assert [member.host for member in elastic.chosen(turn, moved[:2])] == ["algo-1", "algo-2", "algo-3"]
    del nodes["algo-1"]
    assert [member.host for member in elastic.chosen(turn, moved)] == ["algo-2", "algo-3"]
