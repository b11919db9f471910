"""A host that stands by takes the place of one that is cordoned: by an operator, or since all others wait for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.straggler import Quota
from tests.support.local_run import ROOT, LocalRun

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400)]

STEPS, EVERY, GATE_AT = 240, 4, 220
KNOBS = ("elastic.spares=1", f"checkpoint.snapshot_every={EVERY} steps", f"checkpoint.every={2 * EVERY} steps")


def run_of(folder: Path, *knobs: str, steps: int = STEPS, arguments: tuple[str, ...] = ()) -> LocalRun:
    settings = [word for knob in (*KNOBS, *knobs) for word in ("--set", knob)]
    options = ["--store", str(folder / "store"), *settings]
    words = [f"--steps={steps}", *arguments]
    return LocalRun(folder / "run", "loop.py", words, options, hosts=3)


def worlds(run: LocalRun) -> dict[int, tuple[list[str], int]]:
    """The members of each generation that became ready, and the step that it goes on from."""
    found = {}
    for host in run.names:
        for event in [*run.events("record_put", host), *run.events("record_seen", host)]:
            record = event["record"]
            if record["kind"] == "generation" and record["phase"] == "ready":
                resume = record["resume"]
                found[record["number"]] = ([m[0] for m in record["members"]], resume["step"] if resume else 0)
    return found


def first_world(run: LocalRun) -> tuple[str, str, str]:
    """Who trains at first, in rank order, and who stands by: whoever came last."""
    (members, _), *others = worlds(run).values()
    assert not others, run.told()
    (spare,) = set(run.names) - set(members)
    return members[0], members[1], spare


def committed(run: LocalRun) -> list[int]:
    return [event["step"] for event in run.events("checkpoint_committed")]


def recoveries(run: LocalRun) -> list[dict[str, Any]]:
    return run.summary()["recoveries"]


@contextlib.contextmanager
def slowed(run: LocalRun, host: str) -> Iterator[None]:
    """The host's worker gets a tenth of a core: much less than it needs, and than others leave it on a busy machine."""
    (pid,) = {event["pid"] for event in run.events("worker_started", host)}
    quota = Quota(pid, 0.1)
    try:
        yield
    finally:
        quota.open()


def test_a_spare_takes_over_from_a_cordoned_host(tmp_path, capsys):
    gate = tmp_path / "gate"
    with run_of(tmp_path, arguments=(f"--gate={GATE_AT}:{gate}",)) as run:
        run.wait_for(lambda: committed(run), "commit")
        before = max(committed(run))
        chief, cordoned, spare = first_world(run)
        command = [sys.executable, "-m", "keepstep", "cordon", cordoned, "--at", str(run.folder), "--why", "a test"]
        told = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")}, capture_output=True)
        assert told.returncode == 0, told
        run.wait_for(lambda: all("workers_held" in run.reasons(host) for host in (chief, cordoned)), "pause")
        gate.touch()
        assert run.wait() == 0, run.told()
    found = worlds(run)
    assert [sorted(members) for members, _ in found.values()] == [sorted([chief, cordoned]), sorted([chief, spare])]
    resumed = found[2][1]
    assert resumed >= before  # no committed step was lost, and none executed twice: they went on from an agreed one
    assert run.summary()["lost_steps"] == 0
    assert max(committed(run)) == STEPS
    first = [event["at"] for event in run.events("first_step_completed") if event["step"] == resumed + 1]
    paused = [turn["now"] for host in run.names for turn in run.turns(host) if ["host_cordoned", ""] in turn["notes"]]
    with capsys.disabled():
        print(f"\na spare is in {max(first) - min(paused):.2f} s after the cordon, from step {resumed}")


def test_a_straggler_is_replaced_by_a_spare(tmp_path):
    knobs = ("straggler.respond=replace", "straggler.slower_than=3", "straggler.window=5", "straggler.windows=2")
    with run_of(tmp_path, *knobs, steps=100_000, arguments=("--loose", "--pause=0")) as run:
        run.wait_for(lambda: run.completed() >= 20, "steps")
        chief, slow, spare = first_world(run)
        with slowed(run, slow):
            run.wait_for(lambda: "straggler_replaced" in run.reasons(), "verdict")
            run.wait_for(lambda: len(worlds(run)) > 1, "world")
        run.terminate()
        assert run.wait() == 143, run.told()
    assert [sorted(members) for members, _ in worlds(run).values()] == [sorted([chief, slow]), sorted([chief, spare])]
    notes = [detail for host in run.names for reason, detail in run.notes(host) if reason == "straggler_found"]
    # a quota holds the process up wherever it is just then, in steps as short as these
    assert notes[0].startswith(f"{slow} rank 1 works "), notes
