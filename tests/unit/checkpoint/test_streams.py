"""Transfers side by side: more of them only where they wait for their other side."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from keepstep.checkpoint import streams
from keepstep.checkpoint.streams import STREAMS_MAX, Streams, divide

MB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that stands until it is moved."""
    now = [100.0]
    monkeypatch.setattr(streams, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def side_by_side(monkeypatch):
    monkeypatch.setattr(streams.os, "sched_getaffinity", lambda _pid: {0, 1})
    made = Streams("test")
    yield made
    made.close()


def together(side_by_side, count):
    """Whether so many transfers run at the same time; each waits for the others."""
    barrier = threading.Barrier(count)
    return sorted(side_by_side.run([lambda: barrier.wait(60)] * count)) == list(range(count))


def paced(side_by_side, clock, bytes_per_s):
    pace = side_by_side.pace()
    clock[0] += 5.0  # to connect, which does not count
    pace.moved(MB)
    for _ in range(8):
        clock[0] += MB / bytes_per_s
        pace.moved(MB)


def most_at_once(side_by_side):
    """The most of many transfers that were seen to run at the same time."""
    lock, running, seen = threading.Lock(), [0], []

    def transfer():
        with lock:
            running[0] += 1
            seen.append(running[0])
        sum(range(20_000))  # long enough for the others to come as well
        with lock:
            running[0] -= 1

    side_by_side.run([transfer] * 100)
    return max(seen)


def test_as_many_as_there_are_cores(side_by_side):
    assert together(side_by_side, 2)
    assert most_at_once(side_by_side) <= 2


def test_one_that_waits_for_its_other_side_lets_another_one_go(side_by_side, clock):
    paced(side_by_side, clock, 90e6)
    assert together(side_by_side, 3)
    assert most_at_once(side_by_side) <= 3


def test_a_fast_one_stays_alone(side_by_side, clock):
    paced(side_by_side, clock, 400e6)
    assert most_at_once(side_by_side) <= 2


def test_there_is_a_most(side_by_side, clock):
    for _ in range(3 * STREAMS_MAX):
        paced(side_by_side, clock, 1e6)
    assert together(side_by_side, STREAMS_MAX)
    assert most_at_once(side_by_side) <= STREAMS_MAX


def test_after_the_first_that_fails_none_begins(monkeypatch):
    monkeypatch.setattr(streams.os, "sched_getaffinity", lambda _pid: {0})
    begun = []

    def transfer(number):
        begun.append(number)
        if number == 1:
            raise ValueError("broke off")

    one_by_one = Streams("test")
    with pytest.raises(ValueError, match="broke off"):
        one_by_one.run([partial(transfer, number) for number in range(100)])
    assert begun[-1] == 1
    assert one_by_one.run([lambda: "again"]) == ["again"]
    one_by_one.close()


def test_when_it_raises_none_is_under_way(side_by_side):
    both, ended = threading.Barrier(2), []

    def fails():
        both.wait(60)
        raise ValueError("broke off")

    def goes_on():
        both.wait(60)
        sum(range(1_000_000))
        ended.append(True)

    with pytest.raises(ValueError, match="broke off"):
        side_by_side.run([goes_on, fails])
    assert ended == [True]


def test_what_they_return_is_in_their_order(side_by_side):
    assert side_by_side.run([partial(str, number) for number in range(50)]) == [str(number) for number in range(50)]


@pytest.mark.parametrize(
    ("size_bytes", "ranges", "first"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (16 * MB, 1, 16 * MB),
        (17 * MB, 2, 16 * MB),
        (400 * MB, 8, 50 * MB),
        (800 * MB, 13, 64 * MB),
    ],
)
def test_the_ranges_of_an_object(size_bytes, ranges, first):
    found = divide(size_bytes, 16 * MB, 64 * MB)
    assert len(found) == ranges and sum(size for _, size in found) == size_bytes
    assert [begin for begin, _ in found] == [sum(size for _, size in found[:at]) for at in range(ranges)]
    assert not ranges or found[0][1] == first
