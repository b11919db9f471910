"""`keepstep local` as a process: whatever ends it ends its hosts."""

from __future__ import annotations

import asyncio
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

from keepstep.app import local
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


def test_hosts_do_not_outlive_a_run_that_is_killed_nor_does_etcds_data_outlive_the_next_one(tmp_path):
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
        data = [Path(note.read_text()) for note in (tmp_path / "run").glob("hosts/*/scratch/etcd-data")]
        local._discard_data_of_the_killed()
        assert data and all(each.exists() for each in data)  # of who is alive nothing is taken
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert eventually(lambda: not marked(mark)), marked(mark)
        following = Played(tmp_path / "other", {"algo-1": []})
        with following._files:
            following._prepare()
        assert not any(each.exists() for each in data)
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


# --- hosts that are killed as machines are ---------------------------------------------------------------------------


class Played(local.Local):
    """Hosts that end as told: by name, for each time that one is booted, after which others' ends, and how."""

    def __init__(self, folder: Path, lives: dict[str, list[tuple[str, int]]]) -> None:
        plan = local.LocalRun(len(lives), "job.py", (), "", (), "none", folder, (), True)
        super().__init__(plan)
        self.lives, self.booted = lives, dict.fromkeys(lives, 0)
        self.over = {name: asyncio.Event() for name in ["", *lives]}
        self.over[""].set()

    async def _boot(self, host: local._Host) -> int:
        after, code = self.lives[host.name][self.booted[host.name]]
        self.booted[host.name] += 1
        await self.over[after].wait()
        if code != -signal.SIGKILL:
            self.over[host.name].set()
        return code


@pytest.mark.parametrize(
    ("lives", "codes"),
    [
        ({"algo-1": [("algo-2", 0)], "algo-2": [("", -9), ("", 0)]}, [0, 0]),
        ({"algo-1": [("", 0)], "algo-2": [("algo-1", -9)]}, [0, 137]),
        ({"algo-1": [("", -9), ("algo-2", 0)], "algo-2": [("", -9), ("", 3)]}, [0, 3]),
        ({"algo-1": [("", -9), ("", 0)]}, [0]),
    ],
    ids=["another one waits", "the others are done", "both are killed", "there is no other"],
)
def test_a_host_that_is_killed_comes_back_where_the_job_goes_on(tmp_path, monkeypatch, lives, codes):
    monkeypatch.setattr(local, "_RETURN_S", 0.0)

    async def scenario() -> list[int | None]:
        played = Played(tmp_path, lives)
        played.hosts = [local._Host(name, tmp_path / name, 0, 0) for name in lives]
        await asyncio.gather(*map(played._keep, played.hosts))
        return [host.exit_code for host in played.hosts]

    assert asyncio.run(scenario()) == codes


def test_a_journal_that_can_not_be_opened_just_now_is_looked_at_again(tmp_path):
    """An agent that begins moves the one before it aside."""
    host = local._Host("algo-1", tmp_path, 0, 0)
    host.journal.parent.mkdir(parents=True)
    host.journal.write_text('{"pid": 7}\n')
    host.look()
    host.journal.rename(tmp_path / "before")
    host.journal.mkdir()
    host.look()
    assert host.agent_pid == 7
    host.journal.rmdir()
    host.journal.write_text('{"pid": 8}\n')
    host.look()
    assert host.agent_pid == 8
    host.close()


def test_a_run_leaves_no_file_open(tmp_path):
    """In a process of its own: what is open here may be others'."""
    script = tmp_path / "job.py"
    script.write_text("print('done')\n")
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(script), str(tmp_path / "run"), f"launch.python={sys.executable}"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "0, left open: []" in done.stdout, done.stdout + done.stderr


RUNS = """
import asyncio, os, sys
from pathlib import Path
from keepstep.app.local import Local, LocalRun

script, folder, setting = sys.argv[1:]
plan = LocalRun(2, script, (), "default", (setting,), f"{folder}/store", Path(folder), (), True)
job = Local(plan)
code = asyncio.run(job.run())
names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
print(f"{code}, left open:", [name for name in names if name.endswith(".jsonl") or "/keepstep-ports/" in name])
"""
