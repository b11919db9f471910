"""What may differ between ranks is never taken for silent corruption, and what takes long never for a hang.

KEEPSTEP_TEST_ALL=1: over 200 checkpoints, and for twenty minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun

CHECKPOINTS, EPOCHS = (200, 40) if os.environ.get("KEEPSTEP_TEST_ALL") else (12, 2)
STEPS = 20  # of an epoch of uneven.py
HOUR_S = 3600.0
CLOSE = ("hang.factor=2", "hang.floor=3s", "hang.data=90s", "hang.pause=90s")
"""Much closer than a policy's own; a busy machine's disk alone can hold a checkpoint up for many seconds."""

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(HOUR_S)]


def test_normalization_and_metrics_raise_no_alarm(tmp_path: Path) -> None:
    every = [word for name in ("snapshot_every", "every") for word in ("--set", f"checkpoint.{name}=1 steps")]
    options = ["--store", str(tmp_path / "store"), *every]
    with LocalRun(tmp_path / "run", "normed.py", (), options, deadline_s=HOUR_S) as run:
        run.wait_for(lambda: len(set(committed(run))) >= CHECKPOINTS, "so many checkpoints")
        run.terminate()
        assert run.wait() == 143, run.told()
    assert run.events("replicas_compared") == []
    assert "replica_divergence" not in run.reasons()


def test_what_takes_long_is_no_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for knob in CLOSE for word in ("--set", knob)]
    words = [f"--epochs={EPOCHS}"]
    with LocalRun(tmp_path / "run", "uneven.py", words, options, deadline_s=HOUR_S) as run:
        assert run.wait() == 0, run.told()
    assert "world_hangs" not in run.reasons()
    summary = run.summary()
    assert (summary["steps"], summary["restarts"]) == (EPOCHS * STEPS, 0)
    trained = run.accounts()[run.names[0]]
    with capsys.disabled():
        minutes = (trained["ended_at"] - trained["born_at"]) / 60.0
        print(f"\nno false alarm in {minutes:.1f} minutes of slow steps, evaluations and checkpoints")


def committed(run: LocalRun) -> list[int]:
    return [event["step"] for event in run.events("checkpoint_committed")]
