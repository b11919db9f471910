"""One bit that is wrong in one host's slab: the host and the tensor are named, and no such step is ever committed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.journal import read_lines
from keepstep.app.replay import journals_under

ROOT = Path(__file__).resolve().parents[2]
STEPS = 240

pytestmark = pytest.mark.integration


def train(folder: Path, hosts: int, corrupt: int = -1) -> str:
    """Let hosts train on this machine, without TensorFlow; returns what was said.

    What rank `corrupt` saves is wrong once something is committed.
    """
    settings = [
        word
        for setting in ("checkpoint.snapshot_every=4 steps", "checkpoint.every=8 steps")
        for word in ("--set", setting)
    ]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(hosts), "--python", sys.executable),
            *("--out", str(folder), "--store", str(folder / "store"), *settings),
            *(str(ROOT / "tests" / "support" / "lockstep_job.py"), str(folder), str(STEPS), "0.02", str(corrupt)),
        ],
        env={"PYTHONPATH": str(ROOT / "runtime"), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def turns(folder: Path) -> list[dict[str, Any]]:
    return [line for path in journals_under(folder / "hosts") for _, line in read_lines(path) if "event" in line]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [turn["event"] for turn in turns(folder) if turn["event"]["kind"] == kind]


def divergences(folder: Path) -> list[str]:
    """What was told of replicas that differ."""
    return [detail for turn in turns(folder) for reason, detail in turn["notes"] if reason == "replica_divergence"]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_replica_that_differs_is_named_and_never_committed(tmp_path: Path, rank: int) -> None:
    train(tmp_path, 3, rank)
    wrong_from = int((tmp_path / "wrong_from").read_text())
    compared = events(tmp_path, "replicas_compared")
    assert compared
    assert all(event["differ"] == [[f"algo-{rank + 1}", "replicated/total"]] for event in compared)
    assert all(event["step"] >= wrong_from for event in compared)
    (told,) = {detail.partition(": ")[2] for detail in divergences(tmp_path) if "replicated/" in detail}
    assert f"algo-{rank + 1}" in told and "replicated/total" in told
    committed = [event["step"] for event in events(tmp_path, "checkpoint_committed")]
    assert committed and max(committed) < wrong_from
    head = json.loads(next((tmp_path / "store").glob("*/HEAD.json")).read_text())
    assert head["step"] == max(committed)


def test_of_replicas_that_agree_nothing_is_said(tmp_path: Path) -> None:
    train(tmp_path, 2)
    assert events(tmp_path, "replicas_compared") == divergences(tmp_path) == []
    assert max(event["step"] for event in events(tmp_path, "checkpoint_committed")) == STEPS
