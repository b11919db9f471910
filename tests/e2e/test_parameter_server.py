"""ParameterServerStrategy with a script that knows nothing of keepstep: who is replaced in its place, who is not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.local_run import PYTHON, ROOT, LocalRun
from tests.support.ports import free_port

EPOCHS, STEPS = 8, 40
OPTIONS = ("--set", "launch.strategy=parameter_server", "--set", "restart.backoff.first=0s")

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400)]


def tasks(run: LocalRun) -> dict[str, int]:
    """Pid of each process of the script, by its role and number."""
    found = {}
    for pid in run.left():
        with contextlib.suppress(OSError, KeyError, ValueError):
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            environment = dict(line.split("=", 1) for line in lines if "=" in line)
            task = json.loads(environment["TF_CONFIG"])["task"]
            if b"served.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[f"{task['type']} {task['index']}"] = pid
    return found


def epoch(run: LocalRun) -> int:
    path = run.folder / "results" / "epoch"
    return int(path.read_text() or 0) if path.exists() else 0


def started(run: LocalRun) -> list[dict[str, int]]:
    """What each chief has found to go on from."""
    lines = (run.folder / "results" / "started.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run_of(folder: Path) -> LocalRun:
    return LocalRun(folder / "run", "served.py", [f"--epochs={EPOCHS}", f"--steps={STEPS}"], OPTIONS, hosts=3)


def test_a_worker_is_replaced_while_chief_and_parameter_servers_stay(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        run.wait_for(lambda: epoch(run) >= 2, "epoch 2")
        before = tasks(run)
        assert set(before) == {"chief 0", "ps 0", "ps 1", "ps 2", "worker 0", "worker 1"}
        os.kill(before["worker 1"], signal.SIGKILL)
        run.wait_for(lambda: tasks(run).get("worker 1", before["worker 1"]) != before["worker 1"], "another worker 1")
        after = tasks(run)
        assert {name: pid for name, pid in after.items() if name != "worker 1"} == {
            name: pid for name, pid in before.items() if name != "worker 1"
        }
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert run.summary()["generations"] == 1, run.told()
    assert "server_replaced" in run.reasons()
    assert [each["epoch"] for each in started(run)] == [0]
    count = json.loads((run.folder / "results" / "done.json").read_text())["count"]
    assert EPOCHS * STEPS <= count <= EPOCHS * STEPS + 1  # what a dying worker had done may be done again


def test_an_evaluator_sees_what_the_chief_has_saved_and_is_replaced_in_its_place(tmp_path: Path) -> None:
    options = (*OPTIONS, "--set", "launch.evaluator=on")
    gate = tmp_path / "gate"
    arguments = [f"--epochs={EPOCHS}", f"--steps={STEPS}", f"--gate={gate}"]
    with LocalRun(tmp_path / "run", "served.py", arguments, options, hosts=2) as run:

        def evaluated() -> list[tuple[int, int]]:
            path = run.folder / "results" / "evaluated"
            lines = path.read_text().splitlines() if path.exists() else []
            return [(int(pid), int(epoch)) for pid, epoch in map(str.split, lines)]

        run.wait_for(lambda: evaluated(), "an evaluation")
        before = tasks(run)
        os.kill(before["evaluator 0"], signal.SIGKILL)
        run.wait_for(lambda: len({pid for pid, _ in evaluated()}) == 2, "an evaluation by another one")
        after = tasks(run)
        gate.touch()
        assert {name for name, pid in after.items() if before[name] != pid} == {"evaluator 0"}
        assert run.wait() == 0, run.told()
        assert run.left() == []
        assert all(1 <= epoch <= EPOCHS for _, epoch in evaluated())
    assert run.summary()["generations"] == 1, run.told()


def test_without_a_parameter_server_the_world_starts_anew_from_the_files(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        run.wait_for(lambda: epoch(run) >= 3, "epoch 3")
        before = tasks(run)
        os.kill(before["ps 1"], signal.SIGKILL)
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert run.summary()["generations"] == 2, run.told()
    (allowed,) = {detail for name in run.names for reason, detail in run.notes(name) if reason == "restart_allowed"}
    assert allowed.startswith("killed on algo-2 rank 1 "), allowed
    first, second = started(run)
    assert first == {"epoch": 0, "count": 0}
    assert second["epoch"] >= 3
    assert second["count"] >= second["epoch"] * STEPS
    assert epoch(run) == EPOCHS


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_server_without_the_script_listens_as_what_it_is_told_to_be(role: str, tmp_path: Path) -> None:
    """As `parameter_server_v1` starts the servers: TensorFlow's own, until somebody ends it."""
    ports = {"master": free_port(), "worker": free_port(), "ps": free_port()}
    cluster = {name: [f"127.0.0.1:{port}"] for name, port in ports.items()}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "runtime"),
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}),
    }
    words = [PYTHON, "-m", "keepstep_worker", "--serve"]
    with (tmp_path / "output").open("wb") as output:
        server = subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=output, stderr=output)
    try:
        give_up = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[role]), 5):
                break
            told = (tmp_path / "output").read_text(errors="replace")[-3000:]
            assert server.poll() is None, told
            assert time.monotonic() < give_up, told
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait(30)
