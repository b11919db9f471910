"""What is made of step records: the pace of a worker is that of whole steps, what lies between two of them included."""

from __future__ import annotations

import pytest

from keepstep.app.sampling import mean_step_s
from keepstep_worker.wire import StepRecord

MS = 1_000_000


def step(number: int, start_ms: int, end_ms: int) -> StepRecord:
    return StepRecord(number, number, start_ms * MS, 0, 0, end_ms * MS)


@pytest.mark.parametrize(
    ("records", "ended_ms", "seconds"),
    [
        ([step(1, 20, 25), step(2, 45, 50), step(3, 70, 75)], 0, 0.025),  # from end to end
        ([step(3, 70, 75)], 50, 0.025),  # one alone: since the one before it
        ([step(3, 70, 75)], 0, 0.005),  # of which nothing is known
        ([step(3, 2_070, 2_075)], 50, 0.005),  # after something that is no step
    ],
)
def test_a_step_lasts_until_the_next_one_ends(records, ended_ms, seconds):
    assert mean_step_s(records, ended_ms * MS) == pytest.approx(seconds)
