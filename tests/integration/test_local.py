"""`keepstep local` as a process: whatever ends it ends its hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.kernel import is_alive

ROOT = Path(__file__).resolve().parents[2]
MARK = "KEEPSTEP_TEST_MARK"

pytestmark = pytest.mark.integration


def marked(mark: str) -> list[int]:
    """All living processes that were started with this mark in their environment, directly or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and is_alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def eventually(look: Callable[[], object]) -> bool:
    until = time.monotonic() + 30
    while not look():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_hosts_do_not_outlive_a_run_that_is_killed(tmp_path):
    mark = uuid.uuid4().hex
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(600)\n")
    words = [
        "local",
        "--quiet",
        "--hosts",
        "2",
        "--python",
        sys.executable,
        "--out",
        str(tmp_path / "run"),
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), MARK: mark}
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert eventually(lambda: started_workers(tmp_path / "run") == 2)
        assert len(marked(mark)) > 5
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert eventually(lambda: not marked(mark)), marked(mark)
    finally:
        process.kill()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def started_workers(folder: Path) -> int:
    """How many hosts have told that their worker runs."""
    kinds = [
        json.loads(line)["event"]["kind"]
        for path in folder.glob("hosts/*/output/data/keepstep/*/journal.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if '"event":' in line and line.endswith("\n")
    ]
    return kinds.count("worker_started")
