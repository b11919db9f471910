"""TensorFlow's own profiler, ended in a copy of the process: what is written is whole, and recording is off here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.local_run import PYTHON, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


def test_a_copy_writes_the_profile_and_the_next_one_can_begin(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [PYTHON, str(ROOT / "tests" / "e2e" / "jobs" / "profiled.py"), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert told == [{"copied": True, "wrong": "", "level": -1}] * 2
    for number in ("0", "1"):
        (written,) = (tmp_path / number).glob("plugins/profile/*/*.xplane.pb")
        assert b"MatMul" in written.read_bytes()
