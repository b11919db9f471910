"""On a host with a GPU gradients are timed by a value of them that is copied to the processor, once all are made."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_loop_resume import PYTHON, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_two_values_are_copied_once_all_gradients_are_made(tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run([PYTHON, str(ROOT / "tests/e2e/edge_job.py"), str(out)], env=environment, check=True)
    told = json.loads(out.read_text())
    assert len(told["gradients"]) == 3
    assert told["copied"] == [[1, told["gradients"]], [1, told["gradients"]]]
    assert told["is_timed"]
