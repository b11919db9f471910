"""A limit on how fast bytes are sent: never more over any while, and no less where there is enough to send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.throttle import BURST_S, Throttle


class Line:
    """A clock that goes on while somebody waits, and how much was sent when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[float, int]] = []

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def send(self, throttle: Throttle, size: int) -> None:
        throttle.take(size)
        self.sent.append((self.now, size))


def sending(rate: float, sizes: list[int]) -> Line:
    line = Line()
    throttle = Throttle(rate, lambda: line.now, line.pause)
    for size in sizes:
        line.send(throttle, size)
    return line


@given(st.floats(1e6, 1e9), st.lists(st.integers(1, 1 << 20), min_size=2, max_size=200))
def test_no_faster_than_the_limit(rate, sizes):
    line = sending(rate, sizes)
    begun = line.sent[0][0]
    before = 0
    for at, size in line.sent:
        assert before <= rate * (at - begun + BURST_S) * 1.000001 + 1
        before += size


@given(st.floats(1e6, 1e9), st.lists(st.integers(1, 1 << 20), min_size=2, max_size=200))
def test_no_slower_than_the_limit(rate, sizes):
    assert sending(rate, sizes).now - 100.0 <= sum(sizes) / rate * 1.000001


def test_a_line_that_was_idle_may_not_catch_up():
    line = Line()
    throttle = Throttle(1e6, lambda: line.now, line.pause)
    line.send(throttle, 1_000_000)
    line.now += 60.0
    line.send(throttle, 1_000_000)
    assert line.now == pytest.approx(160.0)
    line.send(throttle, 1)
    assert line.now == pytest.approx(161.0)
