"""A host's ranks as one worker: it ends as the rank that failed first, and says where it only follows another host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import kernel
from tests.support.fake_agent import FakeAgent

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 30.0
MPIRUN = """#!{python}
# Starts two ranks as mpirun does, and ends them all when one fails.
import os, subprocess, sys
words = sys.argv[sys.argv.index("--")+1:]
ranks = []
for rank in range(2):
    told = dict(RANK=rank, SIZE=2, LOCAL_RANK=rank, LOCAL_SIZE=2)
    environment = dict(os.environ, **{{"OMPI_COMM_WORLD_" + name: str(value) for name, value in told.items()}})
    ranks.append(subprocess.Popen(words, env=environment, start_new_session=True))
code = 0
for _ in ranks:
    pid, status = os.wait()
    code = code or os.waitstatus_to_exitcode(status)
    if code:
        for each in ranks:
            if each.pid != pid and each.poll() is None:
                os.killpg(each.pid, 15)
sys.exit(code if code >= 0 else 128 - code)
"""

pytestmark = pytest.mark.timeout(120)


class Host:
    """A host whose mpirun is of the test's own."""

    def __init__(self, folder: Path, script: str, mpirun: str = MPIRUN) -> None:
        self.folder, self.agent = folder, FakeAgent()
        (folder / "bin").mkdir()
        program = folder / "bin" / "mpirun"
        program.write_text(mpirun.format(python=sys.executable))
        program.chmod(0o755)
        (folder / "train.py").write_text(script)
        endpoint = self.agent.connect()
        environment = {
            **os.environ,
            **self.agent.environment(endpoint),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "KEEPSTEP_FAILURE_FILE": str(folder / "error.json"),
            "PYTHONPATH": str(ROOT / "runtime"),
            "PYTHONUNBUFFERED": "1",
        }
        bootstrap = [sys.executable, "-m", "keepstep_worker"]
        self.process = subprocess.Popen(
            [*bootstrap, "--mpirun", "mpirun", "--", *bootstrap, "--rank", str(folder / "train.py")],
            env=environment, cwd=folder, pass_fds=(self.agent.wire_fd, endpoint.fileno()), stdout=subprocess.PIPE,
        )  # fmt: skip
        endpoint.close()

    def end(self) -> tuple[int, str]:
        """Exit code, and what was printed."""
        said, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, said.decode()

    def error(self) -> dict[str, object]:
        path = self.folder / "error.json"
        return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for host in made:
        for pid in kernel.family(kernel.processes(), [host.process.pid]):
            kernel.kill(pid)
        host.process.kill()
        host.process.communicate()
        host.agent.close()


RANK = """
import os, signal, sys, time
rank = int(os.environ["KEEPSTEP_RANK"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once, as two ranks write to one pipe
"""


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("say('rank', rank, 'of', os.environ['KEEPSTEP_WORLD_SIZE'])", 0, None),
        ("sys.exit(3) if rank == 1 else time.sleep(60)", 3, ("", "", 1)),
        ("sys.exit('no') if rank == 0 else time.sleep(60)", 1, ("", "", 0)),
        ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(60)", -9, ("", "", 0)),
        ("os.kill(os.getpid(), 11) if rank == 1 else time.sleep(60)", -11, ("", "", 1)),
        ("time.sleep(60 * (1 - rank))\nraise ValueError('rank %d' % rank)", 1, ("ValueError", "rank 1", 1)),
    ],
)
def test_the_host_ends_as_its_first_failing_rank(
    tmp_path: Path, hosts: list[Host], body: str, code: int, error: tuple[str, str, int] | None
) -> None:
    hosts.append(Host(tmp_path, RANK + body))
    ended, said = hosts[0].end()
    assert ended == code, said
    told = hosts[0].error()
    assert (error is None and not told) or (told["type"], told["message"], told["rank"]) == error
    if code == 0:
        assert sorted(said.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


ENDS_ALL = (
    MPIRUN.partition("code = 0\n")[0]
    + """import time
while len(os.listdir("up")) < 2:
    time.sleep(0.01)
for number in (15, 9):
    for each in ranks:
        if each.poll() is None:
            os.killpg(each.pid, number)
    time.sleep(0.5)
sys.exit(143)
"""
)
"""An mpirun that has heard of a failure on another host."""
STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: None)\n"
POLITE = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"


@pytest.mark.parametrize("answer", ["", POLITE, STUBBORN], ids=["dies", "exits", "goes on"])
def test_ranks_that_mpirun_ends_are_victims_of_another_host(tmp_path: Path, hosts: list[Host], answer: str) -> None:
    (tmp_path / "up").mkdir()
    hosts.append(
        Host(tmp_path, RANK + answer + "open('up/%d' % rank, 'w').close()\nwhile True: time.sleep(60)", ENDS_ALL)
    )
    ended, _ = hosts[0].end()
    assert ended == 143
    told = hosts[0].error()
    assert (told["type"], told["victim"]) == ("ConnectionAbortedError", True)


def test_a_signal_for_the_script_reaches_each_rank_and_ends_nothing_else(tmp_path: Path, hosts: list[Host]) -> None:
    saves = """
def save(*_):
    time.sleep(0.3)
    open(f"saved-{rank}", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
say("up")
while True: time.sleep(60)
"""
    hosts.append(Host(tmp_path, RANK + saves))
    assert hosts[0].process.stdout is not None
    assert [hosts[0].process.stdout.readline() for _ in range(2)] == [b"up\n", b"up\n"]
    hosts[0].process.send_signal(signal.SIGTERM)
    hosts[0].end()
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


def test_an_mpirun_that_starts_nothing_ends_the_host_by_its_own_code(tmp_path: Path, hosts: list[Host]) -> None:
    hosts.append(Host(tmp_path, "", "#!/bin/sh\necho no such option >&2\nexit 213\n"))
    assert hosts[0].end()[0] == 213
    assert hosts[0].error() == {}


def test_without_an_mpirun_the_host_says_so(tmp_path: Path, hosts: list[Host]) -> None:
    hosts.append(Host(tmp_path, "", "#!/bin/nothing\n"))
    assert hosts[0].end()[0] != 0


def test_all_ranks_go_with_the_hosts_own_process(tmp_path: Path, hosts: list[Host]) -> None:
    hosts.append(Host(tmp_path, RANK + "say(os.getpid(), os.getppid())\ntime.sleep(600)"))
    assert hosts[0].process.stdout is not None
    pids = [int(word) for _ in range(2) for word in hosts[0].process.stdout.readline().split()]
    hosts[0].process.kill()
    give_up = time.monotonic() + DEADLINE_S
    while any(kernel.is_alive(pid) for pid in pids):
        assert time.monotonic() < give_up, pids


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_that_goes_without_a_word_counts_as_killed(tmp_path: Path, hosts: list[Host], local_rank: int) -> None:
    """Its parent speaks for it; so where that one is killed itself, nobody does."""
    hosts.append(Host(tmp_path, RANK + "say(rank, os.getppid())\ntime.sleep(600)"))
    assert hosts[0].process.stdout is not None
    parents = dict(map(int, hosts[0].process.stdout.readline().split()) for _ in range(2))
    os.kill(parents[local_rank], signal.SIGKILL)
    assert hosts[0].end()[0] == -9
