"""What TensorFlow does with the memory of values that are held while their variables change: it leaves it alone.

The whole of snapshots that are copied behind the steps rests on this.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.local_run import PYTHON, ROOT

pytestmark = pytest.mark.e2e


def test_a_value_that_is_held_stays_as_it_was_however_its_variable_changes() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [PYTHON, str(ROOT / "tests" / "e2e" / "jobs" / "held.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    *told, last = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert last == {"left_alone": True}
    assert len({each["case"] for each in told}) > 60
    assert [each for each in told if not each["same"]] == []
    assert [each for each in told if not each["changed"]] == [], "what did not change shows nothing"
