"""Who is bad, by what hosts have measured of themselves and of each other."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keepstep.core.preflight_records import Check, Complaint, Guest, Link, PreflightPlan, PreflightRecord, Rate
from keepstep.core.preflight_verdict import LINK_FLOOR, LINK_RATIO, SKEW_S_MAX, SLOW_RATIO, find_flaws, partners_of
from keepstep.core.values import evolve
from keepstep.errors import ExitCode

USUAL = 1e9


def plan_of(count: int, others: int = 0) -> PreflightPlan:
    guests = tuple(Guest(f"algo-{n}", f"node-{n}", "", 1) for n in range(1, count + 1))
    return PreflightPlan(1, guests, tuple(Guest(f"old-{n}", f"old-{n}", "", 1) for n in range(others)))


def measured(
    plan: PreflightPlan,
    links: dict[str, float] | None = None,
    speeds: dict[str, float] | None = None,
    skews: dict[str, float] | None = None,
    cut: tuple[str, ...] = (),
) -> dict[str, PreflightRecord]:
    """What all guests say where a host's end carries `links`, the line between the two of `cut` nothing at all."""
    found = {}
    for guest in plan.guests:
        lines = []
        for peer in partners_of(plan, guest.host):
            rate = min((links or {}).get(host, USUAL) for host in (guest.host, peer.host))
            ahead_s = (skews or {}).get(peer.host, 0.0) - (skews or {}).get(guest.host, 0.0)
            gone = {guest.host, peer.host} == set(cut)
            lines.append(Link(peer.host, error="no answer") if gone else Link(peer.host, rate, USUAL, ahead_s))
        rates = (Rate(Check.SPEED, (speeds or {}).get(guest.host, USUAL)),)
        found[guest.host] = PreflightRecord(guest.host, guest.node_id, 1, "m", True, rates, links=tuple(lines))
    return found


def named(plan: PreflightPlan, records: dict[str, PreflightRecord]) -> list[tuple[Check, tuple[str, ...]]]:
    return [(flaw.check, flaw.hosts) for flaw in find_flaws(plan, records)]


@given(st.integers(1, 40))
def test_each_pair_is_measured_once_and_each_host_twice(count):
    plan = plan_of(count)
    pairs = [
        frozenset((guest.host, peer.host)) for guest in plan.guests for peer in partners_of(plan, guest.host)
    ]  # fmt: skip
    assert len(pairs) == len(set(pairs)) and all(len(pair) == 2 for pair in pairs)
    seen = Counter(host for pair in pairs for host in pair)
    least = min(2, count - 1)
    assert all(seen[guest.host] >= least for guest in plan.guests)
    assert max(seen.values(), default=0) <= 3


def test_newcomers_are_measured_with_those_who_train():
    plan = plan_of(2, others=3)
    assert [[peer.host for peer in partners_of(plan, f"algo-{n}")] for n in (1, 2)] == [
        ["old-0", "old-1"], ["old-2", "old-0"],
    ]  # fmt: skip
    assert [peer.host for peer in partners_of(plan_of(1, others=1), "algo-1")] == ["old-0"]
    assert partners_of(plan, "old-0") == ()


@given(st.integers(1, 30))
def test_where_all_is_well_nothing_is_found(count):
    plan = plan_of(count)
    assert find_flaws(plan, measured(plan)) == ()


@given(st.integers(3, 30), st.data())
def test_the_host_with_the_slow_line_is_named_and_nobody_else(count, data):
    plan, bad = plan_of(count), f"algo-{data.draw(st.integers(1, count))}"
    rate = data.draw(st.floats(0.0, LINK_RATIO, exclude_max=True)) * USUAL
    assert named(plan, measured(plan, links={bad: rate})) == [(Check.LINK, (bad,))]


@given(st.integers(2, 30), st.data(), st.floats(0.01, 1.5))
def test_a_slow_processor_is_named_by_its_share(count, data, share):
    assume(abs(share - SLOW_RATIO) > 0.01)
    plan, bad = plan_of(count), f"algo-{data.draw(st.integers(1, count))}"
    wanted = [(Check.SPEED, (bad,))] if share < SLOW_RATIO else []
    others = named(plan, measured(plan, speeds={bad: share * USUAL}))
    if count == 2 and share * SLOW_RATIO > 1:
        wanted = [(Check.SPEED, tuple({"algo-1", "algo-2"} - {bad}))]
    assert others == wanted


@given(st.integers(3, 30), st.data())
def test_the_wrong_clock_is_named(count, data):
    plan, bad = plan_of(count), f"algo-{data.draw(st.integers(1, count))}"
    ahead_s = data.draw(st.floats(SKEW_S_MAX * 1.01, 1000)) * data.draw(st.sampled_from((1, -1)))
    assert named(plan, measured(plan, skews={bad: ahead_s})) == [(Check.CLOCK, (bad,))]


def test_of_two_hosts_both_are_named():
    plan = plan_of(2)
    assert named(plan, measured(plan, links={"algo-2": LINK_FLOOR / 2})) == [(Check.LINK, ("algo-1", "algo-2"))]
    assert named(plan, measured(plan, links={"algo-2": LINK_FLOOR * 2})) == []
    assert named(plan, measured(plan, skews={"algo-2": 5.0})) == [(Check.CLOCK, ("algo-1", "algo-2"))]
    (flaw,) = find_flaws(plan, measured(plan, cut=("algo-1", "algo-2")))
    assert flaw.tell() == "algo-1 or algo-2: link: algo-2 is not reached from algo-1: no answer; wanted 20 MB/s"


@pytest.mark.parametrize("count", [3, 4, 7])
def test_a_line_that_is_cut_between_two_sound_hosts_is_theirs(count):
    plan = plan_of(count)
    for guest in plan.guests:
        for peer in partners_of(plan, guest.host):
            assert named(plan, measured(plan, cut=(guest.host, peer.host))) == [(Check.LINK, (guest.host, peer.host))]


def test_one_slow_line_beside_one_to_a_bad_host_is_held_against_neither_end():
    plan = plan_of(4)
    pairs = [{guest.host, peer.host} for guest in plan.guests for peer in partners_of(plan, guest.host)]
    for bad in {guest.host for guest in plan.guests}:
        for hit in ({*pair} for pair in pairs if bad not in pair):
            records = measured(plan, links={bad: 0.01 * USUAL})
            slow = {
                host: tuple(evolve(link, sent=0.1 * USUAL) if {host, link.peer} == hit else link for link in each.links)
                for host, each in records.items()
            }
            records = {host: evolve(each, links=slow[host]) for host, each in records.items()}
            (worst, second) = named(plan, records)
            assert worst == (Check.LINK, (bad,)) and second[0] is Check.LINK and set(second[1]) == hit


def test_a_host_that_was_tried_by_one_alone_and_in_vain_is_named():
    plan = plan_of(3)
    records = measured(plan, cut=("algo-1", "algo-3"))
    records["algo-1"] = evolve(records["algo-1"], links=())
    assert named(plan, records) == [(Check.LINK, ("algo-1",))]


def dead_lines(plan: PreflightPlan, *bad: str) -> dict[str, PreflightRecord]:
    """Records in which nothing comes through between a bad host and any other."""
    dead = {
        host: tuple(Link(link.peer, error="no answer") if {host, link.peer} & {*bad} else link for link in each.links)
        for host, each in measured(plan).items()
    }
    return {host: evolve(each, links=dead[host]) for host, each in measured(plan).items()}


def test_who_was_tried_by_bad_hosts_alone_is_not_named():
    plan = plan_of(6)
    for first in plan.guests:
        for second in plan.guests:
            found = named(plan, dead_lines(plan, first.host, second.host))
            assert {host for _, hosts in found for host in hosts} <= {first.host, second.host}


def test_beside_a_silent_host_the_one_that_more_have_tried_is_named():
    plan = plan_of(6)
    for silent in plan.guests:
        for bad in plan.guests:
            records = dead_lines(plan, bad.host)
            del records[silent.host]
            if bad is not silent:
                assert {h for _, hosts in named(plan, records) for h in hosts} <= {silent.host, bad.host}


def test_who_says_nothing_is_named_for_that_alone():
    plan = plan_of(4)
    records = measured(plan, links={"algo-3": 0.0})
    del records["algo-3"]
    assert named(plan, records) == [(Check.ANSWER, ("algo-3",))]
    assert find_flaws(plan, records)[0].exit_code is ExitCode.TOO_FEW_HOSTS


def test_an_answer_of_another_node_or_preflight_is_none():
    plan = plan_of(2)
    records = measured(plan)
    old = records["algo-2"]
    for node_id, number in (("other", 1), (old.node_id, 0)):
        again = PreflightRecord("algo-2", node_id, number, "m", True, old.rates)
        assert named(plan, {**records, "algo-2": again}) == [(Check.ANSWER, ("algo-2",))]


def test_what_is_broken_comes_before_what_is_slow():
    plan = plan_of(3)
    records = measured(plan, links={"algo-1": 0.01 * USUAL}, speeds={"algo-2": 0.6 * USUAL})
    third = records["algo-3"]
    complaints = (Complaint(Check.DISK, "model: full"),)
    records["algo-3"] = PreflightRecord("algo-3", third.node_id, 1, "m", True, third.rates, complaints, third.links)
    assert [flaw.hosts for flaw in find_flaws(plan, records)] == [("algo-3",), ("algo-1",), ("algo-2",)]


def test_only_what_is_alike_is_compared():
    plan = plan_of(3)
    records = measured(plan, speeds={"algo-1": 0.1 * USUAL})
    first = records["algo-1"]
    for machine, quiet in (("other", True), ("m", False)):
        records["algo-1"] = PreflightRecord("algo-1", "node-1", 1, machine, quiet, first.rates, (), first.links)
        assert named(plan, records) == []


def test_one_gpu_less_than_the_others_is_one_too_few():
    plan = plan_of(3)
    records = {
        guest.host: PreflightRecord(guest.host, guest.node_id, 1, rates=(Rate(Check.GPU, gpus),))
        for guest, gpus in zip(plan.guests, (8.0, 7.0, 8.0), strict=True)
    }
    (flaw,) = find_flaws(plan, records)
    assert (flaw.tell(), flaw.exit_code) == ("algo-2: gpu: 7, others 8", ExitCode.HARDWARE)


def test_a_newcomer_is_held_against_those_who_train():
    plan = plan_of(1, others=2)
    rates = (Rate(Check.SPEED, USUAL),)
    old = {
        "old-0": PreflightRecord("old-0", "old-0", 0, "m", True, rates, links=(Link("old-1", USUAL, USUAL),)),
        "old-1": PreflightRecord("old-1", "old-1", 0, "m", True, rates),
    }
    slow = (Link("old-0", 1e6, 1e6), Link("old-1", 1e6, 1e6))
    new = PreflightRecord("algo-1", "node-1", 1, "m", True, (Rate(Check.SPEED, 0.2 * USUAL),), links=slow)
    assert named(plan, {**old, "algo-1": new}) == [(Check.LINK, ("algo-1",)), (Check.SPEED, ("algo-1",))]
