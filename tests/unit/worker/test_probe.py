"""Reading the probe costs time: it is read once in a while. What it measures is shown with TensorFlow, elsewhere."""

from __future__ import annotations

import time

import pytest

from keepstep_worker import probe


@pytest.fixture
def stamp(monkeypatch):
    fresh = probe._Stamp()
    monkeypatch.setattr(probe, "_stamp", fresh)
    return fresh


def test_nothing_was_measured_before_anything_was_traced(stamp):
    assert probe.gradients_ready_ns(0) == 0


def test_what_was_noted_outside_of_functions_costs_nothing_to_read_each_time(stamp):
    start_ns = time.monotonic_ns()
    stamp.eager_ns = start_ns + 1
    assert [probe.gradients_ready_ns(start_ns) for _ in range(3)] == [start_ns + 1] * 3
    assert probe.gradients_ready_ns(start_ns + 1) == 0  # of an earlier step


def test_a_variable_that_was_just_read_is_not_read_again(stamp):
    stamp.handle, stamp.due_ns = "no handle: reading it would fail", time.monotonic_ns() + 10**12
    assert probe.gradients_ready_ns(1) == 0
