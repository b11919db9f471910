"""How often a snapshot is taken: seldom enough to be cheap, and in steps that ranks share while they change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.facts import Worker
from keepstep.core.pace import SNAPSHOT_EVERY_MAX, STALL_RATIO_MAX, snapshot_every
from keepstep.core.policy import Policy
from keepstep.core.records import Member, Phase, Standing, StatusRecord
from keepstep.core.splits import Split
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import Seen, with_generation, with_status
from tests.unit.core.values import a_generation, a_turn

powers = st.sampled_from([2**n for n in range(11)])


def a_turn_with(policy: Policy | None, *costs: float) -> Turn:
    """A leader's turn that has heard what snapshots cost on each host."""
    turn = a_turn(policy)
    hosts = [f"algo-{n}" for n in range(1, len(costs) + 1)]
    generation = a_generation(phase=Phase.READY, members=tuple(Member(host, f"node of {host}") for host in hosts))
    cluster = with_generation(turn.state.cluster, Seen(generation, 1))
    for revision, (host, cost) in enumerate(zip(hosts, costs, strict=True), 2):
        status = StatusRecord(host, f"node of {host}", 3, Standing.RUNNING, snapshot_cost_ratio=cost)
        cluster = with_status(cluster, host, Seen(status, revision))
    turn.set(cluster=cluster)
    return turn


def every(current: int, *costs: float) -> int:
    return snapshot_every(a_turn_with(None, *costs), a_generation(snapshot_every=current))


def test_the_policys_word_holds():
    policy = Policy.model_validate({"checkpoint": {"snapshot_every": "7 steps"}})
    assert snapshot_every(a_turn_with(policy, 9.0), a_generation(snapshot_every=7)) == 7


def test_unmeasured_costs_change_nothing():
    assert every(8) == every(8, 0.0, 0.0) == 8


@given(powers, st.lists(st.floats(0.0001, 5.0), min_size=1, max_size=4))
def test_snapshots_stay_within_their_share_and_are_powers_of_two(current, costs):
    wanted = every(current, *costs)
    assert wanted.bit_count() == 1
    assert max(costs) / wanted <= STALL_RATIO_MAX


@given(powers, st.floats(0.0001, 5.0))
def test_the_cadence_settles(current, cost):
    once = every(current, cost)
    assert every(once, cost) == once


def test_a_little_cheaper_is_no_reason_to_change():
    assert every(16, 0.08) == 16
    assert every(16, 0.02) == 4


def test_the_slowest_host_decides():
    assert every(1, 0.005, 0.3) == 64


def every_when_hurt(current: int, cost: float, step_s: float, *ago: float) -> int:
    """On a host that is no member: what a step takes it knows from the others."""
    turn = a_turn_with(None, cost)
    (host,) = turn.state.cluster.statuses
    seen = turn.state.cluster.statuses[host]
    status = evolve(seen.record, splits=(Split(9, 9, step_s, 0.0, 0.0, 0.0),))
    turn.set(cluster=with_status(turn.state.cluster, host, Seen(status, 9)))
    return snapshot_every(turn, a_generation(snapshot_every=current, failed_at=tuple(turn.now - each for each in ago)))


def test_a_job_that_is_often_hurt_pays_for_more_snapshots():
    """Snapshots of 40 ms beside steps of 50 ms, hurt each 20 s: sqrt(2 * 0.8 * 400) steps, in powers of two 32."""
    assert every_when_hurt(8, 0.8, 0.05) == every_when_hurt(8, 0.8, 0.05, 60.0) == 256
    assert every_when_hurt(256, 0.8, 0.05, 60.0, 40.0, 20.0, 0.0) == 32


@given(powers, st.floats(1e-3, 1.0), st.floats(0.01, 1.0), st.floats(2.0, 600.0))
def test_a_hurt_job_loses_little_more_than_with_the_best_interval(current, cost, step_s, between_s):
    """Steps lost from one failure to the next: those that snapshots take, and half an interval that is done again."""

    def lost(interval: float) -> float:
        return cost * steps / interval + interval / 2

    steps = between_s / step_s
    found = every_when_hurt(current, cost, step_s, *[between_s * n for n in (3, 2, 1, 0)])
    best = max(1.0, (2 * cost * steps) ** 0.5)
    cheap = every(current, cost)
    assert lost(found) <= 1.15 * lost(best) or found in (cheap, SNAPSHOT_EVERY_MAX)


@given(powers, st.floats(1e-3, 1.0), st.floats(0.9, 1.1))
def test_a_hurt_job_s_interval_settles_although_costs_differ(current, cost, other):
    once = every_when_hurt(current, cost, 0.05, 60.0, 40.0, 20.0, 0.0)
    assert every_when_hurt(once, cost, 0.05, 60.0, 40.0, 20.0, 0.0) == once
    changed = every_when_hurt(once, cost * other, 0.05, 60.0, 40.0, 20.0, 0.0)
    assert every_when_hurt(changed, cost, 0.05, 60.0, 40.0, 20.0, 0.0) == changed


def test_a_job_that_was_hurt_long_ago_does_not():
    assert every_when_hurt(32, 0.8, 0.05, 80_000.0, 79_000.0) == 256


def test_where_a_step_s_time_is_unknown_a_hurt_job_keeps_its_cadence():
    assert every_when_hurt(8, 0.8, 0.0, 60.0, 40.0, 20.0, 0.0) == 8
    assert every_when_hurt(8, 0.8, 0.0, 60.0) == 256


@given(powers, st.floats(1e-4, 5.0), st.floats(1e-4, 10.0), st.lists(st.floats(0.0, 1e6), min_size=2, max_size=4))
def test_to_be_hurt_never_means_fewer_snapshots(current, cost, step_s, ago):
    hurt = every_when_hurt(current, cost, step_s, *sorted(ago, reverse=True))
    assert hurt.bit_count() == 1 and hurt <= max(current, every(current, cost))


def every_timed(current: int, step_s: float, every: str, cost: float = 0.0, done: int = 9) -> int:
    """Where the policy has a word on checkpoints, and steps take so long."""
    turn = a_turn_with(Policy.model_validate({"checkpoint": {"every": every}}), cost)
    turn.set(workers=(Worker("algo-1.0", 3, 0, 0.0, completed=done, step_s=step_s),))
    return snapshot_every(turn, a_generation(snapshot_every=current))


def test_a_checkpoint_that_is_due_by_the_clock_has_a_snapshot_to_be_made_of():
    assert every_timed(8, 30.0, "2min") == 4
    assert every_timed(8, 500.0, "2min") == 1
    assert every_timed(8, 30.0, "2min", cost=0.9) == 4
    assert every_timed(256, 1.0, "2min", cost=0.9) == 64
    assert every_timed(8, 0.01, "2min") == 8


def test_what_hardly_fits_in_is_left_as_it_is():
    assert [every_timed(now, 1.85, "2min", cost=0.9) for now in (32, 64)] == [32, 64]
    assert [every_timed(now, 1.4, "2min", cost=0.9) for now in (32, 64)] == [64, 64]
    assert [every_timed(now, 1.9, "2min", cost=0.9) for now in (32, 64)] == [32, 32]


def test_a_checkpoint_of_keepsteps_own_choice_does_not_wait_for_eight_long_steps():
    assert every_timed(8, 4.0, "auto") == 2
    assert every_timed(8, 4.0, "auto", cost=0.04) == 8, "what it costs is known by then"
    assert every_timed(8, 4.0, "8 steps") == 8


def test_a_first_step_that_is_traced_tells_nothing_of_the_others():
    assert every_timed(8, 40.0, "2min", done=1) == 8
