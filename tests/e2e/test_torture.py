"""A few of the kills of `make torture`: nothing that was committed is lost, and nothing else is restored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = 12

pytestmark = [pytest.mark.e2e, pytest.mark.hosts, pytest.mark.timeout(600)]


def test_what_is_restored_was_committed_or_sealed_whoever_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.torture", "--kills", str(KILLS), "--out", str(tmp_path / "torture")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "runtime"), str(ROOT)))}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["checkpoints_lost"] == 0, told
    assert sum(found["kills"].values()) == KILLS, told
    assert found["checkpoints_verified"] > KILLS, told
