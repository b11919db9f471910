"""Every type that a variable can have, and every form of shape."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.local_run import PYTHON, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_what_is_saved_of_a_variable_of_any_type_and_shape_is_what_comes_back() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [PYTHON, str(Path(__file__).parent / "dtypes_job.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "108 variables, wrong: []; 0 kB mapped in; refused: [True, True]" in ended.stdout
