"""Snapshots that are copied while the training goes on, and what they rest on.

TensorFlow leaves the memory of values that are held alone while their variables change.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import PYTHON, ROOT, LocalRun, differences

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def lines_of(job: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [PYTHON, str(ROOT / "tests" / "e2e" / "jobs" / job)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def test_a_copy_is_one_whatever_its_size_and_place() -> None:
    ways = ["in fours", "straight"] if os.uname().machine == "x86_64" else ["plain"] * 2
    ways += ["by whole lines"] if b"avx512f" in Path("/proc/cpuinfo").read_bytes().split() else []
    right = {"wrong": [], "refused": True, "together": True, "left": True, "told": True}
    assert lines_of("streamed.py") == [{"way": way, **right} for way in [*ways, "plain"]]


def test_a_value_that_is_held_stays_as_it_was_however_its_variable_changes() -> None:
    *told, last = lines_of("held.py")
    assert last == {"left_alone": True}
    assert len({each["case"] for each in told}) > 60
    assert [each for each in told if not each["same"]] == []
    assert [each for each in told if not each["changed"]] == [], "what did not change shows nothing"


def test_a_death_costs_no_bit_of_a_large_state(tmp_path: Path) -> None:
    words = ["--steps=150", "--wide=1000"]
    options = ("--set", "checkpoint.snapshot_every=6 steps", "--set", "checkpoint.every=12 steps")
    with LocalRun(tmp_path / "quiet", "loop.py", words, options) as quiet:
        assert quiet.wait() == 0, quiet.told()
    with LocalRun(tmp_path / "hurt", "loop.py", words, (*options, "--fault", "kill:1@33")) as hurt:
        assert hurt.wait() == 0, hurt.told()
    assert hurt.summary()["restarts"] == 1, hurt.told()
    assert "resume_from_slabs" in hurt.reasons(), hurt.told()
    assert differences(hurt.results(), quiet.results()) == []
    for run in (quiet, hurt):
        copied = [int(path.read_text()) for path in sorted((run.folder / "results").glob("beside-*"))]
        assert len(copied) == 2
        assert all(copied), "none was copied beside the steps"
