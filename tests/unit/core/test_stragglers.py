"""Who is slow beside the others, and how windows of steps are added up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.app.sampling import EVERY_S
from keepstep.core.records import EQUAL_WEIGHT
from keepstep.core.slowness import Crowd, excess, is_slow
from keepstep.core.splits import Part, Split, added, begin, is_full
from keepstep.core.stragglers import _stale, balanced, window_s
from keepstep.core.view import Seen, with_generation
from tests.unit.core.values import a_generation, a_turn

SECONDS = st.floats(0.0, 10.0, allow_nan=False)


def split(compute_s: float, data_s: float = 0.0, rest_s: float = 0.0, step_s: float = 0.1) -> Split:
    return Split(20, 5, data_s, compute_s, max(0.0, step_s - compute_s - data_s - rest_s), rest_s)


@given(st.lists(st.tuples(st.integers(1, 50), SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=20))
def test_a_window_is_the_mean_over_all_its_steps(samples):
    window = begin(0, 0.0)
    for number, (timed, *seconds) in enumerate(samples, 1):
        window = added(window, Split(number, timed, *seconds))
    count = sum(timed for timed, *_ in samples)
    total = window.total
    assert (total.step, total.timed) == (len(samples), count)
    for place, found in enumerate((total.data_s, total.compute_s, total.wait_s, total.rest_s), 1):
        assert found == pytest.approx(sum(sample[0] * sample[place] for sample in samples) / count, abs=1e-5)


def test_steps_that_were_not_measured_count_as_steps():
    window = added(added(begin(10, 5.0), Split(15, 3, 0.1, 0.2, 0.3, 0.4)), Split(40, 0, 0.0, 0.0, 0.0, 0.0))
    assert window.total == Split(40, 3, 0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    ("step", "now", "timed", "full"),
    [(30, 6.0, 2, True), (29, 6.0, 3, False), (30, 5.9, 3, False), (30, 6.0, 1, False)],
)
def test_a_window_is_full_of_steps_time_and_measures(step, now, timed, full):
    window = added(begin(10, 5.0), Split(step, timed, 0.0, 0.1, 0.0, 0.0))
    assert is_full(window, 20, 1.0, now) is full


@given(st.floats(0.001, 1.0), st.floats(1.0, 4.0), st.floats(1.05, 3.0))
def test_of_two_ranks_the_one_that_works_longer_by_the_ratio_is_slow(own_s, times, slower_than):
    slow, other = split(own_s * times, step_s=own_s * times), split(own_s, step_s=own_s * times)
    costs = own_s * times - own_s >= 0.05 * own_s * times
    if times >= slower_than * 1.001:
        assert is_slow(slow, [other], slower_than) is costs
    if times <= slower_than * 0.999:
        assert not is_slow(slow, [other], slower_than)
    assert times == 1.0 or not is_slow(other, [slow], slower_than)


def test_windows_of_several_ranks_are_their_own():
    first, second = Split(5, 3, 0.0, 0.1, 0.0, 0.0, 0), Split(5, 3, 0.0, 0.3, 0.0, 0.0, 1)
    windows = [added(begin(0, 0.0), each) for each in (first, second)]
    assert [(window.total.rank, window.total.compute_s) for window in windows] == [(0, 0.1), (1, 0.3)]
    unmeasured = Split(9, 0, 0.0, 0.0, 0.0, 0.0, 1)
    assert added(windows[1], unmeasured).total == Split(9, 3, 0.0, 0.3, 0.0, 0.0, 1)


def test_what_scatters_among_many_is_no_straggler():
    peers = [split(ms / 1e3) for ms in (10, 14, 18, 22, 26, 30)]
    assert not is_slow(split(0.032), peers, 1.3)
    assert is_slow(split(0.060), peers, 1.3)
    assert is_slow(split(0.032), [split(0.020)] * 6, 1.3)


def test_what_costs_little_of_a_step_is_left_alone():
    assert not is_slow(split(0.004, step_s=0.1), [split(0.002)], 1.3)


def test_the_part_that_is_longer_is_told_from_the_others():
    own, peers = split(0.02, data_s=0.03), [split(0.02, rest_s=0.01), split(0.021)]
    assert max(Part, key=lambda part: excess(own, peers, part)) is Part.DATA
    assert excess(own, peers, Part.COMPUTE) < 0.0


def test_a_large_world_says_less_often_how_it_goes():
    assert (window_s(2), window_s(500)) == (0.4, 4.0)


def test_in_a_small_world_each_sample_may_fill_a_window():
    assert window_s(2) < EVERY_S


@pytest.mark.parametrize(("step_s", "stale"), [(0.1, 24), (0.05, 24), (0.005, 240), (0.001, 1200)])
def test_where_steps_are_short_a_window_of_the_same_time_is_more_steps_away(step_s, stale):
    """Else most of the others would count as having said nothing: a window has all steps of half a second."""
    turn = a_turn()
    turn.set(cluster=with_generation(turn.state.cluster, Seen(a_generation(), 1)))
    assert _stale(turn, [split(0.0, step_s=step_s), split(0.0, step_s=2 * step_s)]) == stale


@given(st.lists(st.tuples(st.integers(0, 80), SECONDS), min_size=2, max_size=30), st.floats(1.05, 3.0))
def test_a_crowd_judges_each_as_it_would_be_judged_beside_its_peers(found, slower_than):
    splits = {f"algo-{n}": Split(step, 5, 0.0, work_s, 0.1, 0.0) for n, (step, work_s) in enumerate(found)}
    crowd = Crowd(splits, 60)
    for host, own in splits.items():
        peers = [each for other, each in splits.items() if other != host and each.step >= own.step - 60]
        assert crowd.peers(host) == peers
        assert crowd.is_alone(host) is not bool(peers)
        if peers:
            assert crowd.is_slow(host, slower_than) is is_slow(own, peers, slower_than)


def test_weights_go_by_what_each_rank_does_in_its_time():
    found, even_s = balanced({"a": 1000, "b": 1000}, {"a": split(0.030), "b": split(0.060)})
    assert found == {"a": 1333, "b": 667}
    assert even_s == pytest.approx(0.040)
    assert balanced({"a": 1333, "b": 667}, {"a": split(0.040), "b": split(0.040)})[0] == {}


def test_no_part_of_the_batch_shrinks_to_nothing():
    """Where most of what a rank does does not grow with its part, its weight would fall again and again."""
    weights = {"a": 1000, "b": 1000, "c": 1000, "d": 1000}
    for _ in range(20):
        times = {host: 0.1 * weight / 1000 + (0.2 if host == "d" else 0.0) for host, weight in weights.items()}
        found, _ = balanced(weights, {host: split(time_s, step_s=0.35) for host, time_s in times.items()})
        weights = found or weights
    assert min(weights.values()) == EQUAL_WEIGHT // 4
