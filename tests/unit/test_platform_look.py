"""`keepstep doctor --aws`, as processes of their own: what they tell, and what they must not."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.platform.machine import cgroup, mounts
from keepstep.adapters.platform.neighbours import Neighbour
from keepstep.adapters.platform.rights import capabilities_of, hide, signal_name, signals_of
from keepstep.app.cli import main
from keepstep.app.platform_facts import follow_metadata, names_in, secrets_in
from keepstep.app.platform_look import GRACE_S, Ending
from tests.house.source import ROOT
from tests.support.metadata_service import metadata_service
from tests.support.ports import free_port
from tests.unit.intake.opt_ml import make_opt_ml

DEADLINE_S = 30.0
FACTS = {
    "record", "hosts", "process 1", "this process", "kernel", "cgroup", "processors", "space", "limits", "mounts",
    "names", "identity", "calls", "environment", "devices", "interfaces", "clocks", "door", "metadata", "heartbeat",
}  # fmt: skip
Line = dict[str, Any]


class Doctor:
    """One host's command, and the lines that it has printed so far."""

    def __init__(self, base: Path, *words: str, **variables: str) -> None:
        nobody = f"http://127.0.0.1:{free_port()}/"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "runtime")}
        environment |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": nobody, **variables}
        command = [sys.executable, "-m", "keepstep", "doctor", "--aws", "--base-dir", str(base), *words, "train"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        self.text = b""

    @property
    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.text.splitlines(keepends=True) if line.endswith(b"\n")]

    def until(self, seen: Callable[[list[Line]], object]) -> list[Line]:
        """Read on until the lines are as they should be."""
        deadline = time.monotonic() + DEADLINE_S
        while not seen(self.lines):
            assert select.select([self.process.stdout], [], [], deadline - time.monotonic())[0], self.text.decode()
            data = os.read(self.process.stdout.fileno(), 65_536)
            assert data, self.text.decode()
            self.text += data
        return self.lines

    def until_told(self, what: str, **wanted: object) -> Line:
        """Read on until there is such a line."""

        def found(lines: list[Line]) -> list[Line]:
            return [line for line in lines if {"what": what, **wanted}.items() <= line.items()]

        return found(self.until(found))[0]

    def wait(self) -> int:
        """The exit code, once everything is read."""
        self.text += self.process.stdout.read()
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        if not self.process.stdout.closed:
            with self.process:
                self.text += self.process.stdout.read()


@pytest.fixture
def start() -> Iterator[Callable[..., Doctor]]:
    doctors: list[Doctor] = []

    def begin(base: Path, *words: str, **variables: str) -> Doctor:
        doctors.append(Doctor(base, "--port-base", str(free_port()), *words, **variables))
        return doctors[-1]

    yield begin
    for doctor in doctors:
        doctor.kill()


def one_host(folder: Path, host: str = "localhost", hosts: tuple[str, ...] = ()) -> Path:
    return make_opt_ml(folder, {"current_host": host, "hosts": list(hosts or (host,))})


def test_every_fact_is_told_and_no_value_of_a_variable(tmp_path, start):
    values = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCY",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/0f1e2d3c",
        "AWS_REGION": "an-ordinary-region-1",
        "SM_HP_NOTE": "quite an ordinary value",
        "WANDB_API_KEY": "key-that-is-part-of-a-path",
    }
    base = one_host(tmp_path / values["WANDB_API_KEY"])
    doctor = start(base, "--linger", "10min", **values)
    doctor.until(lambda lines: {line["what"] for line in lines} >= FACTS)
    doctor.kill()
    file = (base / "output/data/keepstep/localhost/platform.jsonl").read_bytes()
    assert file.startswith(doctor.text)
    assert [value for value in values.values() if value.encode() in file] == []
    lines = {line["what"]: line for line in map(json.loads, file.splitlines())}
    assert set(values) <= set(lines["environment"]["names"])
    assert lines["environment"]["credentials"] == ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_SECRET_ACCESS_KEY"]
    assert {line["host"] for line in lines.values()} == {"localhost"}
    assert "/***/" in lines["record"]["path"]
    assert lines["kernel"]["release"] == os.uname().release
    assert "refused" in lines["metadata"]["token"]
    told = {what for what, line in lines.items() if "error" in line}
    assert told <= {"space"}  # of folders that the platform would have made


def test_signals_are_told_and_end_nothing_until_the_kill(tmp_path, start):
    doctor = start(one_host(tmp_path), "--linger", "10min")
    doctor.until_told("heartbeat")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGRTMIN + 2):
        doctor.process.send_signal(number)
        told = doctor.until_told("signal", signal=signal_name(number), number=int(number))
        assert (told["sender_pid"], told["sender_uid"]) == (os.getpid(), os.getuid())
    beats = [line["beat"] for line in doctor.lines if line["what"] == "heartbeat"]
    after = doctor.until_told("heartbeat", beat=beats[-1] + 1)
    assert GRACE_S - 5 < after["ends_in_s"] < GRACE_S
    doctor.process.send_signal(signal.SIGINT)
    doctor.until_told("signal", signal="SIGINT")
    doctor.process.send_signal(signal.SIGINT)
    assert doctor.wait() == 130
    assert doctor.lines[-1]["why"] == "a second SIGINT"


def test_a_host_leaves_and_the_other_one_sees_it_go(tmp_path, start):
    hosts, port = ("127.0.0.1", "127.0.0.2"), str(free_port())
    stays, leaves = (
        start(one_host(tmp_path / host, host, hosts), "--address", host, "--linger", linger, "--leave", hosts[1],
              "--exit-code", "7", "--port-base", port)
        for host, linger in zip(hosts, ("10min", "4s"), strict=True)
    )  # fmt: skip
    seen = stays.until_told("neighbour", neighbour=hosts[1], state="connected")
    assert (seen["address"], seen["addresses"]) == (hosts[1], [hosts[1]])
    stays.until_told("caller", state="connected")
    assert leaves.wait() == 7
    assert (leaves.lines[-1]["what"], leaves.lines[-1]["why"]) == ("end", "told to leave")
    gone = stays.until_told("neighbour", neighbour=hosts[1], state="gone")
    assert gone["at"] > leaves.lines[-1]["at"] - 0.5
    assert "refused" in stays.until_told("neighbour", neighbour=hosts[1], state="unreachable", port=int(port))["error"]
    stays.until_told("caller", state="gone")


@pytest.mark.parametrize("has_folder", [True, False])
def test_what_can_not_be_had_is_said_and_ends_nothing(tmp_path, start, has_folder):
    base = tmp_path / "ml"
    if not has_folder:
        base.write_text("a file")
    doctor = start(base, "--linger", "500ms", "--address", "192.0.2.1")
    assert doctor.wait() == 0
    told = {line["what"]: line for line in doctor.lines}
    assert ("error" in told["record"]) is not has_folder
    assert "resourceconfig.json" in told["hosts"]["error"]
    assert "assign" in told["door"]["error"]
    assert (told["end"]["code"], told["end"]["why"]) == (0, "the time is over")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--leave", "algo-9"], "--leave: found algo-9; wanted one of the hosts: algo-1"),
        (["--linger", "5"], "--linger: found 5"),
        (["--linger", "2000h"], "--linger: found 2000h; wanted a day at most"),
        (["--exit-code", "256"], "--exit-code: found 256; wanted 0 to 255"),
        (["script.py"], "SCRIPT: found script.py; wanted no script with --aws"),
    ],
)
def test_what_can_not_be_done_is_refused_before_anything_begins(tmp_path, capsys, words, key):
    base = one_host(tmp_path, "algo-1")
    assert main(["doctor", "--aws", "--base-dir", str(base), *words]) == 78
    assert key in capsys.readouterr().err
    assert not (base / "output").exists()


def test_when_a_host_ends():
    ending = Ending(100.0, 60.0, None)
    assert (ending.at, ending.code) == (160.0, 0)
    ending.on_signal(signal.SIGUSR1, 110.0)
    ending.on_signal(signal.SIGINT, 110.0)
    assert (ending.at, ending.code) == (160.0, 0)
    ending.on_signal(signal.SIGTERM, 120.0)
    ending.on_signal(signal.SIGTERM, 130.0)
    assert (ending.at, ending.code) == (120.0 + GRACE_S, 143)
    ending = Ending(100.0, 60.0, 3)
    assert (ending.at, ending.code) == (130.0, 3)


def test_a_host_that_falls_silent_is_gone_and_one_that_never_speaks_is_mute():
    told: list[tuple[str, str]] = []
    news, stop = threading.Condition(), threading.Event()

    def tell(what: str, state: str, error: str = "", **_: object) -> None:
        with news:
            told.append((state, error))
            news.notify()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        neighbour = Neighbour("127.0.0.1", listener.getsockname()[1], tell, stop, silent_s=0.05)
        connection, _ = listener.accept()
        connection.send(b".")
        with news:
            assert news.wait_for(lambda: ("mute", "timed out") in told, DEADLINE_S), told
        stop.set()
        connection.close()
        neighbour.thread.join(DEADLINE_S)
    assert told == [("connected", ""), ("gone", "silent for 0.05 s"), ("mute", "timed out")]


def test_a_name_that_nobody_has_is_told_once():
    told = threading.Event()
    stop = threading.Event()
    seen: list[dict[str, object]] = []

    def tell(_: str, **found: object) -> None:
        seen.append(found)
        told.set()

    neighbour = Neighbour("a..b", 1, tell, stop)
    assert told.wait(DEADLINE_S)
    stop.set()
    neighbour.thread.join(DEADLINE_S)
    assert [found["state"] for found in seen] == ["unresolved"]


def test_a_notice_is_told_when_it_comes(monkeypatch):
    lines: list[dict[str, object]] = []

    class Record:
        def write(self, what: str, **found: object) -> None:
            lines.append({"what": what, **found})

    with metadata_service() as service:

        class Stop(threading.Event):
            """In place of the time between two questions: at first nothing happens, then a notice, then the end."""

            waits = 0

            def wait(self, timeout: float | None = None) -> bool:
                self.waits += 1
                if self.waits == 2:
                    service.take_away(1_800_000_000)
                if self.waits == 3:
                    self.set()
                return self.is_set()

        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
        follow_metadata(Record(), Stop())
    assert [(line["what"], line["token"], line["spot"]) for line in lines] == [
        ("metadata", 200, 404),
        ("metadata", 200, 200),
    ]


def test_names_of_credentials_and_their_values():
    environ = {"AWS_REGION": "r" * 9, "AWS_ROLE_ARN": "a" * 9, "AWS_SESSION_TOKEN": "t" * 9, "MY_PASSWORD": "p" * 9,
               "API_KEY": "short"}  # fmt: skip
    assert names_in(environ) == {"names": sorted(environ), "credentials": ["AWS_ROLE_ARN", "AWS_SESSION_TOKEN"]}
    assert secrets_in(environ) == {"t" * 9, "p" * 9}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["keepstep", "doctor", "--aws", "train"], ["keepstep", "doctor", "--aws", "train"]),
        (["x", "--api-token", "abc", "--n", "1"], ["x", "--api-token", "***", "--n", "1"]),
        (["x", "--password=abc=d", "DB_SECRET=e"], ["x", "--password=***", "DB_SECRET=***"]),
        (["x", "--auth-required", "--port", "1"], ["x", "--auth-required", "--port", "1"]),
    ],
)
def test_a_command_is_shown_without_its_secrets(words, shown):
    assert hide(words) == shown


def test_masks_have_names():
    assert signals_of(f"{1 << 14 | 1 << 1:x}") == ["SIGINT", "SIGTERM"]
    assert (signal_name(signal.SIGRTMIN + 3), signal_name(32)) == ("SIGRTMIN+3", "signal 32")
    assert capabilities_of(f"{1 << 19 | 1 << 41:x}") == ["sys_ptrace", "41"]


def test_mounts_at_and_below_a_folder():
    text = (
        "36 35 98:0 / /opt/ml/input/data rw,noatime shared:1 - fuse.s3 s3 ro\n"
        "37 35 98:0 / /opt/mlx rw - ext4 /dev/b rw\n"
        "38 35 98:0 / /opt/ml/a\\040b ro - ext4 /dev/a rw,x=1\n"
        "torn\n"
        "39 35 98:0 / / rw - overlay overlay rw\n"
    )
    found = mounts("/opt/ml", text)["mounts"]
    assert [(each["at"], each["type"], each["options"], each["of_file_system"]) for each in found] == [
        ("/opt/ml/input/data", "fuse.s3", "rw,noatime", "ro"),
        ("/opt/ml/a b", "ext4", "ro", "rw,x=1"),
        ("/", "overlay", "rw", "rw"),
    ]


def test_limits_of_both_versions_of_control_groups(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/docker/abc\n")
    group = tmp_path / "two" / "docker" / "abc"
    group.mkdir(parents=True)
    (tmp_path / "two" / "cgroup.controllers").touch()
    (group / "memory.max").write_text("1024\n")
    (tmp_path / "two" / "cpu.max").write_text("max 100000\n")
    found = cgroup(tmp_path / "two", own)
    assert (found["version"], found["limits"]) == (2, {"memory.max": "1024", "cpu.max": "max 100000"})
    (tmp_path / "one" / "pids").mkdir(parents=True)
    (tmp_path / "one" / "pids" / "pids.max").write_text("max\n")
    found = cgroup(tmp_path / "one", own)
    assert (found["version"], found["limits"]) == (1, {"pids/pids.max": "max"})
