"""Reading the probe costs time: it is read once in a while. What it measures is shown with TensorFlow, elsewhere."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from keepstep_worker import probe
from keepstep_worker.probe import Moments


@pytest.fixture
def stamps(monkeypatch):
    fresh = probe._Probe()
    monkeypatch.setattr(probe, "_probe", fresh)
    return fresh.stamps


def test_nothing_was_measured_before_anything_was_traced(stamps):
    assert probe.moments(0) == Moments()


def test_what_was_noted_outside_of_functions_costs_nothing_to_read_each_time(stamps):
    start_ns = time.monotonic_ns()
    stamps["gradients"].eager_ns = start_ns + 2
    stamps["data"].eager_ns = start_ns + 1
    assert [probe.moments(start_ns) for _ in range(3)] == [Moments(start_ns + 1, 0, start_ns + 2)] * 3
    assert probe.moments(start_ns + 1) == Moments(0, 0, start_ns + 2)  # the data were there before the step
    assert probe.moments(start_ns + 2) == Moments()  # of an earlier step


def test_a_variable_that_was_just_read_is_not_read_again(stamps):
    stamps["gradients"].handle = "no handle: reading it would fail"
    probe._probe.wanted, probe._probe.read_ns = 3, time.monotonic_ns() + 10**12
    assert [probe.moments(1) for _ in range(2)] == [Moments()] * 2
    assert not probe._probe.off
    probe.moments(1)
    assert probe._probe.off


def read_at(lengths_ns, count):
    """The numbers of the steps that are read, of steps that have these lengths in turn."""
    now_ns, found = 10**12, []
    for number in range(count):
        now_ns += lengths_ns[number % len(lengths_ns)]
        if probe._is_due(now_ns):
            found.append(number)
    return found


@pytest.mark.parametrize("lengths_ms", [(50, 50), (75, 25), (10, 90), (97, 97), (1, 1)])
def test_steps_that_take_turns_are_read_equally_often(stamps, lengths_ms):
    probe._probe.lot.seed(7)
    read = read_at([each * 1_000_000 for each in lengths_ms], 40_000)
    every = max(1, round(200 / sum(lengths_ms)))
    assert 40_000 / every * 0.9 < len(read) < 40_000 / every * 1.1
    assert 0.45 < sum(number % 2 for number in read) / len(read) < 0.55


@pytest.mark.parametrize("turns", [2, 3, 4, 8])
@pytest.mark.parametrize("step_ms", [5, 20, 30, 45])
def test_of_a_batch_that_several_steps_take_each_is_read_in_turn(stamps, monkeypatch, turns, step_ms):
    """So no few readings in a row are all of steps that did not wait for it, as they are by chance now and then."""
    monkeypatch.setattr(probe._probe, "turns", 1)
    probe.expect_turns(turns)
    probe._probe.lot.seed(7)
    read = read_at([step_ms * 1_000_000], 20_000)[1:]
    places = [number % turns for number in read]
    assert all((after - before) % turns == 1 for before, after in pairwise(places))
    every = max(1, round(100 / step_ms))
    assert 20_000 / every * 0.6 < len(read) < 20_000 / every * 1.4, "it costs as much as ever"


def test_a_step_that_takes_long_is_read_whatever_was_drawn(stamps):
    read_at([1_000_000], 1_000)
    probe._probe.wanted = 10**6
    assert probe._is_due(probe._probe.read_ns + 400_000_000)


def test_what_is_no_part_of_the_module_is_left_alone():
    class Module:
        class GradientTape:
            def gradient(self):
                return "gradients"

        class Optimizer:
            pass

    before = Module.GradientTape.gradient
    probe.install(Module)
    assert not vars(Module.Optimizer).get("apply_gradients")
    assert Module.GradientTape.gradient is not before
    assert Module.GradientTape().gradient() == "gradients"  # no library that averages is there


def test_a_step_ends_with_its_last_function_and_what_comes_behind_is_the_scripts(stamps):
    class Module:
        class Function:
            def __call__(self, value):
                return value

    probe.install(Module)
    assert probe.returned_ns(0) == 0
    begun_ns = time.monotonic_ns()
    assert Module.Function()(3) == 3
    ended_ns = time.monotonic_ns()
    assert begun_ns < probe.returned_ns(begun_ns) <= ended_ns
    assert probe.returned_ns(ended_ns) == 0  # of an earlier step


@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
def test_an_optimizer_is_given_what_it_was_given_in_whatever_way(stamps, monkeypatch, method):
    marked = []
    monkeypatch.setattr(probe, "_mark", lambda stamp, found: marked.append(list(found)))

    class Module:
        class BaseOptimizer:
            def apply(self, grads, trainable_variables=None):
                return list(grads), trainable_variables

        class Optimizer:
            def apply_gradients(self, grads_and_vars, name=None):
                return list(grads_and_vars), name

    probe.install(Module)
    if method == "apply":
        made, name, given, wanted = Module.BaseOptimizer(), "grads", ["g", "h"], ["g", "h"]
    else:
        made, name, given, wanted = Module.Optimizer(), "grads_and_vars", [("g", "v"), ("h", "w")], ["g", "h"]
    for found in (getattr(made, method)(iter(given), "x"), getattr(made, method)(iter(given), **{
        "trainable_variables" if method == "apply" else "name": "x"}),
    ):  # fmt: skip
        assert found == (given, "x")
    assert getattr(made, method)(**{name: iter(given)}) == (given, None)
    assert marked == [wanted] * 3
    with pytest.raises(TypeError):
        getattr(made, method)()


def test_what_goes_wrong_ends_the_measuring_and_not_the_step(stamps, capsys):
    stamps["gradients"].handle = "no handle: reading it fails"
    assert [probe.moments(1), probe.moments(1)] == [Moments()] * 2
    assert probe._probe.off
    assert capsys.readouterr().err.count("steps are not timed any more") == 1
