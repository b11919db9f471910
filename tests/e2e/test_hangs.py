"""Whatever a rank hangs in: it is found and named, the stacks of all ranks are kept, and training goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun

STEPS = 80
QUICK = ("hang.floor=3s", "hang.data=8s", "hang.pause=6s", "checkpoint.snapshot_every=4 steps")
CULPRIT = "algo-2"
TOLD = {
    "data": "sleep_for_ever",
    "callback": "sleep_for_ever",
    "lock": "deadlock",
    "native": "spin",
    "kernel": "in uninterruptible sleep",
    "stopped": "stopped by a signal",
}
"""What the reason for the restart says of each."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def run_of(folder: Path, how: str, *knobs: str) -> LocalRun:
    options = [word for knob in (*QUICK, *knobs) for word in ("--set", knob)]
    return LocalRun(folder / "run", "hanging.py", [f"--how={how}"], options)


def test_who_is_stuck_in_its_own_part_of_the_graph_is_told_from_who_waits_for_it(tmp_path: Path) -> None:
    """All are in the same step of a loop of the script's own, in the same call, and a thread of the script lives on."""
    options = [word for knob in QUICK for word in ("--set", knob)]
    with LocalRun(tmp_path / "run", "loop.py", ["--loose", "--stuck=20", f"--steps={STEPS}"], options) as run:
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert run.summary()["restarts"] == 1, run.told()
    (told,) = [text for name in run.names for reason, text in run.notes(name) if reason == "restart_allowed"]
    assert told.startswith(f"hang on {CULPRIT} rank 1 at step 20: pause, step 20 entered, gradients not ready"), told
    assert "this thread is well" in run.log(CULPRIT)


def freeze(run: LocalRun) -> None:
    """Stop the culprit in mid-training by a signal."""
    run.wait_for(lambda: run.completed() >= 20, "step 20")
    os.kill(run.events("worker_started", CULPRIT)[0]["pid"], signal.SIGSTOP)


def test_who_is_stopped_is_the_culprit_though_tensorflow_ends_the_others_before_the_deadline(tmp_path: Path) -> None:
    with run_of(tmp_path, "none", "hang.floor=10min") as run:
        freeze(run)
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert (run.summary()["steps"], run.summary()["restarts"]) == (STEPS, 1), run.told()
    (allowed,) = [detail for name in run.names for reason, detail in run.notes(name) if reason == "restart_allowed"]
    assert allowed.startswith(f"hang on {CULPRIT} rank 1 ") and TOLD["stopped"] in allowed, allowed
    (kept,) = run.folder.glob(f"hosts/*/output/data/keepstep/{CULPRIT}/stacks/*")
    assert re.match(r"Python stacks of process \d+, stopped by a signal", kept.read_text())


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", list(TOLD))
def test_a_hang_is_found_and_the_culprit_named(how: str, tmp_path: Path) -> None:
    # TensorFlow's own heartbeats, of two leases, must not end the others before the deadline: no stacks then
    with run_of(tmp_path, how if how != "stopped" else "none", "coordination.lease=1min") as run:
        if how == "stopped":
            freeze(run)
        assert run.wait() == 0, run.told()
        assert run.left() == []
    summary = run.summary()
    assert (summary["steps"], summary["restarts"]) == (STEPS, 1), run.told()
    allowed = [detail for name in run.names for reason, detail in run.notes(name) if reason == "restart_allowed"]
    assert len(allowed) == 1
    assert allowed[0].startswith(f"hang on {CULPRIT} rank 1 "), allowed
    assert TOLD[how] in allowed[0], allowed
    for rank, name in enumerate(run.names):
        kept = f"generation-1-rank-{rank}.txt"
        text = (run.folder / "hosts" / name / "output" / "data" / "keepstep" / name / "stacks" / kept).read_text()
        assert re.match(r"Python stacks of process \d+, .*(read|written) by", text), text
        stored = [path.read_text() for path in run.folder.glob(f"store/**/notes/stacks/{name}/{kept}")]
        assert stored == [text]
