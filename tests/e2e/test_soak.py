"""A minute of the soak: whatever is done to five hosts, their job ends with every step counted once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.hosts, pytest.mark.timeout(500)]


def test_a_job_that_is_hurt_every_five_seconds_reaches_its_last_step(tmp_path):
    words = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", "60", "--out", str(tmp_path / "soak")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["every_step_once"], told
    assert found["faults"] >= 3, told
    assert found["leaks"]["processes"] == [], told
