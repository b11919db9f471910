"""What may differ between ranks is never taken for silent corruption. KEEPSTEP_TEST_ALL=1: over 200 checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun

CHECKPOINTS = 200 if os.environ.get("KEEPSTEP_TEST_ALL") else 12

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(900)]


def test_normalization_and_metrics_raise_no_alarm(tmp_path: Path) -> None:
    every = [word for name in ("snapshot_every", "every") for word in ("--set", f"checkpoint.{name}=1 steps")]
    options = ["--store", str(tmp_path / "store"), *every]
    with LocalRun(tmp_path / "run", "normed.py", (), options) as run:
        run.wait_for(lambda: len(set(committed(run))) >= CHECKPOINTS, "so many checkpoints")
        run.terminate()
        assert run.wait() == 143, run.told()
    assert run.events("replicas_compared") == []
    assert "replica_divergence" not in run.reasons()


def committed(run: LocalRun) -> list[int]:
    return [event["step"] for event in run.events("checkpoint_committed")]
