"""A step is done again with each rank on another host: who computes something wrong is named, and no result changes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.test_spares import committed, worlds
from tests.support.local_run import LocalRun, differences

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400), pytest.mark.sample(1)]

STEPS, EVERY = 120, 8
GATE_AT = STEPS - EVERY
"""Up to there repeats have time; none begins behind it before the test is content."""


def run_of(folder: Path, *knobs: str, arguments: tuple[str, ...] = ()) -> LocalRun:
    usual = (f"checkpoint.snapshot_every={EVERY // 2} steps", f"checkpoint.every={EVERY} steps", *knobs)
    options = ["--store", str(folder / "store"), *(word for knob in usual for word in ("--set", knob))]
    return LocalRun(folder, "loop.py", (f"--steps={STEPS}", "--pause=0.05", *arguments), options, hosts=3)


def outcomes(run: LocalRun) -> list[tuple[str, str]]:
    """What came of the steps that were done again, and what was told of it.

    That an order came too late for a step is nothing wrong: the next checkpoint gives another one.
    """
    wanted = ("step_repeated", "silent_corruption", "repeat_says_nothing", "repeat_differs")
    notes = [note for host in run.names for note in run.notes(host) if note[0] in wanted]
    return [(reason, detail) for reason, detail in notes if not detail.endswith("went by unseen")]


def went_on_from_what_was_committed(run: LocalRun) -> bool:
    """Whether no generation went back behind a committed step, and each rank came to another host in a repeat."""
    found = list(worlds(run).values())
    moved = all(after == [*before[-1:], *before[:-1]] for (before, _), (after, _) in pairwise(found))
    steps = [step for _, step in found]
    return moved and steps == sorted(steps) and set(steps[1:]) <= set(committed(run))


def test_a_host_that_computes_something_wrong_is_named(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    arguments = ("--wrong=algo-2", f"--gate={GATE_AT}:{gate}")
    with run_of(tmp_path / "run", "health.repeat=1s", arguments=arguments) as run:
        run.wait_for(lambda: "silent_corruption" in run.reasons(), "verdict")
        gate.touch()
        assert run.wait() == 0, run.told()
    found = outcomes(run)
    assert {reason for reason, _ in found} == {"silent_corruption"}, found
    for _, detail in found:
        assert detail.split(": ")[1].startswith("algo-2 computed something else than the others"), detail
        assert detail.count("; rank ") == 1  # the one it had, and the one that it was given
    assert went_on_from_what_was_committed(run), worlds(run)
    assert max(committed(run)) == STEPS


def test_a_host_that_was_wrong_but_once_is_known_after_a_third_time_and_replaced(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    knobs = ("health.repeat=1s", "elastic.spares=1", "failures=[{cause: gpu_fault, respond: restart}]")
    with run_of(tmp_path / "run", *knobs, arguments=("--wrong-once=1", f"--gate={GATE_AT}:{gate}")) as run:
        run.wait_for(lambda: len(worlds(run)) > 3, "world without it")
        gate.touch()
        assert run.wait() == 0, run.told()
    (first, _), (second, begun), (third, again), (fourth, since), *_ = worlds(run).values()
    wrong, (spare,) = first[1], set(run.names) - set(first)
    assert (second, third, sorted(fourth)) == (first[::-1], first, sorted([first[0], spare]))
    assert begun == again == since  # nothing that it had part in is gone on from
    verdict, ending = [detail for reason, detail in outcomes(run) if reason == "silent_corruption"]
    assert ending.startswith("generation 4, ")
    assert f": {wrong} computed something else than the others: rank 1 " in verdict
    assert max(committed(run)) == STEPS


def test_where_all_is_well_a_repeat_changes_nothing_of_what_is_trained(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with run_of(tmp_path / "run", "health.repeat=1s", arguments=(f"--gate={GATE_AT}:{gate}",)) as run:
        run.wait_for(lambda: "step_repeated" in run.reasons(), "verdict")
        gate.touch()
        assert run.wait() == 0, run.told()
    assert {reason for reason, _ in outcomes(run)} == {"step_repeated"}, outcomes(run)
    assert went_on_from_what_was_committed(run), worlds(run)
    summary = run.summary()
    assert (summary["restarts"], max(committed(run))) == (0, STEPS)
    with run_of(tmp_path / "undisturbed", "health.repeat=off") as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.told()
    assert len(worlds(undisturbed)) == 1
    assert differences(run.results(), undisturbed.results()) == []
