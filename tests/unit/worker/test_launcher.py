"""What mpirun takes for ssh: a command of this generation, from a host of this job, runs; nothing else does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.adapters.certificates import issue, make_authority, write_files
from tests.support.fake_agent import FakeAgent
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 30.0
BOOTSTRAP = [sys.executable, "-m", "keepstep_worker"]

pytestmark = pytest.mark.timeout(120)


def certificates(folder: Path) -> Path:
    """A certificate of an authority of its own."""
    authority = make_authority("job", time.time())
    certificate, key = issue(authority, ["localhost", "127.0.0.1"], time.time())
    write_files(folder, authority.certificate, certificate, key)
    return folder


class Pair:
    """Two hosts of a job on this machine: one that waits for a command, and one that asks."""

    def __init__(self, folder: Path) -> None:
        self.tls, self.port, self.agent = certificates(folder / "tls"), free_port(), FakeAgent()
        self.sessions = {host: folder / "mpi" / host for host in ("algo-1", "algo-2")}
        endpoint = self.agent.connect()
        given = self.agent.environment(endpoint)
        own = {
            "PYTHONPATH": str(ROOT / "runtime"),
            "KEEPSTEP_HOST": "algo-2",
            "KEEPSTEP_LISTEN": f"127.0.0.1:{self.port}",
            "KEEPSTEP_TLS": str(self.tls),
            "KEEPSTEP_SESSIONS": str(self.sessions["algo-2"]),
        }
        fds = (self.agent.wire_fd, endpoint.fileno())
        self.waits = subprocess.Popen(
            [*BOOTSTRAP, "--orted"], env={**os.environ, **given, **own}, pass_fds=fds, stdout=subprocess.PIPE
        )
        endpoint.close()

    def ask(self, command: str, host: str = "algo-2", **changed: str) -> subprocess.CompletedProcess[bytes]:
        environment = {
            "PYTHONPATH": str(ROOT / "runtime"),
            "KEEPSTEP_HOST": "algo-1",
            "KEEPSTEP_GENERATION": str(self.agent.generation),
            "KEEPSTEP_PLACES": f"algo-1=127.0.0.1:1 algo-2=127.0.0.1:{self.port}",
            "KEEPSTEP_TLS": str(self.tls),
            "KEEPSTEP_SESSIONS": str(self.sessions["algo-1"]),
            "KEEPSTEP_REGISTER_S": str(DEADLINE_S),
            **changed,
        }
        words = [*BOOTSTRAP, "--reach", host, command]
        return subprocess.run(words, env={**os.environ, **environment}, capture_output=True, timeout=DEADLINE_S)

    def wait_until_it_listens(self) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < give_up
                assert self.waits.poll() is None

    def close(self) -> None:
        self.waits.kill()
        self.waits.communicate()
        self.agent.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("true", 0), ("kill -9 $$", 137)])
def test_a_command_runs_on_the_other_host_and_its_end_is_told(pair: Pair, command: str, code: int) -> None:
    asked = pair.ask(f"echo ran on $KEEPSTEP_HOST; {command}")
    told, _ = pair.waits.communicate(timeout=DEADLINE_S)
    assert asked.returncode == code, asked.stderr
    assert told == b"ran on algo-2\n"
    assert pair.waits.returncode == (-9 if code == 137 else code)


def test_on_this_very_host_it_is_run_here(pair: Pair) -> None:
    asked = pair.ask("echo here; exit 5", host="algo-1")
    assert (asked.stdout, asked.returncode) == (b"here\n", 5)


def test_each_host_keeps_its_sessions_in_a_folder_of_its_own_and_clears_it_first(pair: Pair) -> None:
    for folder in pair.sessions.values():
        folder.mkdir(parents=True)
        (folder / "hwloc.sm").touch()
    show = "echo $OMPI_MCA_orte_tmpdir_base; ls $OMPI_MCA_orte_tmpdir_base"
    assert pair.ask(show, host="algo-1").stdout.decode() == f"{pair.sessions['algo-1']}\n"
    assert (pair.sessions["algo-2"] / "hwloc.sm").exists()
    pair.ask(show)
    assert pair.waits.communicate(timeout=DEADLINE_S)[0].decode() == f"{pair.sessions['algo-2']}\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"KEEPSTEP_GENERATION": "99"}, b"generation is 99, here 1"),
        ({"KEEPSTEP_PLACES": "algo-3=127.0.0.1:{port}", "host": "algo-3"}, b"host is 'algo-3', here 'algo-2'"),
        ({"host": "algo-9"}, b"algo-9 is none of algo-1, algo-2"),
    ],
)
def test_what_is_meant_for_another_world_is_refused_and_the_right_one_still_runs(
    pair: Pair, changed: dict[str, str], said: bytes
) -> None:
    asked = pair.ask("echo wrong", **{name: value.format(port=pair.port) for name, value in changed.items()})
    assert asked.returncode == 255
    assert said in asked.stderr
    assert pair.ask("echo right").returncode == 0
    assert pair.waits.communicate(timeout=DEADLINE_S)[0] == b"right\n"


def plain_line(port: int, tls: Path) -> None:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as line:
        line.sendall(b'{"version": 1, "generation": 1, "host": "algo-2", "command": "echo stranger"}\n')
        line.settimeout(DEADLINE_S)
        assert b"echo" not in line.recv(64)


def without_certificate(port: int, tls: Path) -> None:
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    context.check_hostname = False
    said = {"version": 1, "generation": 1, "host": "algo-2", "command": "echo stranger"}
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain:
        with context.wrap_socket(plain) as line:
            line.sendall(json.dumps(said).encode() + b"\n")
            assert line.recv(64) == b"", "it has answered"


@pytest.mark.parametrize("comes", [plain_line, without_certificate])
def test_a_stranger_has_nothing_run(pair: Pair, comes: Callable[[int, Path], None]) -> None:
    pair.wait_until_it_listens()
    comes(pair.port, pair.tls)
    assert pair.ask("echo right").returncode == 0
    assert pair.waits.communicate(timeout=DEADLINE_S)[0] == b"right\n"


def test_a_certificate_of_another_job_is_none(pair: Pair, tmp_path: Path) -> None:
    other = certificates(tmp_path / "other")
    asked = pair.ask("echo wrong", KEEPSTEP_TLS=str(other), KEEPSTEP_REGISTER_S="0.5")
    assert asked.returncode == 255
    assert pair.ask("echo right").returncode == 0
    assert pair.waits.communicate(timeout=DEADLINE_S)[0] == b"right\n"
