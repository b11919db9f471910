"""A few of the attribution campaign's faults: whatever a rank dies of, that rank and that cause are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.e2e.test_loop_resume import PYTHON, ROOT
from tests.support import control_groups

FAULTS = 8
SEED = zlib.crc32(os.environ.get("KEEPSTEP_TEST_SEED", "").encode())

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.more,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(control_groups.missing("memory")), reason=control_groups.missing("memory")),
]


def test_rank_and_cause_of_every_fault_are_named(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.attribution", "--python", PYTHON, "--faults", str(FAULTS), "--seed", str(SEED)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    told = f"{done.stdout}\n{done.stderr}"
    assert done.stdout, told
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["wrong"], found["value"]) == ([], FAULTS), told  # how soon hangs were found is for the whole campaign
