"""How long a step has waited for its batches."""

from __future__ import annotations

from keepstep_worker.waits import Waits


def test_a_step_that_has_not_waited():
    waits = Waits()
    assert waits.over_ns(0) == 0
    waits.add(5, 10)
    assert waits.over_ns(10) == 0


def test_one_wait_is_over_when_it_is():
    waits = Waits()
    waits.add(1, 9)
    waits.add(12, 20)
    assert waits.over_ns(10) == 20


def test_what_lies_between_several_waits_is_no_waiting():
    waits = Waits()
    waits.add(1, 9)
    for begun_ns in (100, 200, 300, 400):  # a batch in 10, and computing in 90
        waits.add(begun_ns, begun_ns + 10)
    assert waits.over_ns(100) == 140


def test_of_a_wait_that_began_before_the_step_what_lies_in_it():
    waits = Waits()
    waits.add(90, 110)
    waits.add(200, 205)
    assert waits.over_ns(100) == 115
