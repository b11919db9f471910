"""The interval between snapshots that a summary tells is the one that lost steps are to be measured by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.app.summary import Run
from keepstep.core.records import GenerationRecord
from tests.unit.core.values import a_generation


def generation(number: int, snapshot_every: int, lost_steps: int = 0) -> GenerationRecord:
    return replace(a_generation(), number=number, snapshot_every=snapshot_every, lost_steps=lost_steps)


@pytest.mark.parametrize(
    ("worlds", "intervals", "told"),
    [
        ([generation(1, 32)], {1: 64}, 32),  # none was lost
        ([generation(1, 64), generation(2, 32, 59)], {1: 64, 2: 256}, 64),
        ([generation(1, 8), generation(3, 32, 59)], {1: 64, 3: 256}, 64),  # the second never trained
        ([generation(1, 8), generation(2, 8, 5), generation(3, 8, 90)], {1: 8, 2: 128, 3: 8}, 128),
    ],
)
def test_it_is_that_of_the_world_whose_steps_were_lost(worlds, intervals, told):
    run = Run(generations={each.number: each for each in worlds}, intervals=intervals, last=worlds[-1])
    assert run.snapshot_every == told


def test_a_run_that_never_began_has_none():
    assert Run().snapshot_every == 0
