"""Whole jobs in containers, as the platform starts and stops them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.containers.jobs import GATE, Cluster, Job

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

STEPS = 80
GATED = {"steps": STEPS, "gate": f"30:{GATE}"}
USER = 4321
"""Has no name, no home and no right of its own."""


def test_a_worker_that_is_killed_is_survived(cluster: Cluster, store: str, tmp_path: Path) -> None:
    with Job(cluster, tmp_path, "loop.py", GATED, {"KEEPSTEP_STORE": store}) as job:
        job.wait_for(lambda: job.completed("algo-2") >= 20, "step 20")
        assert job.inside("algo-1", "/opt/keepstep/entrypoints/healthcheck").stderr == ""
        job.kill_worker("algo-2")
        job.open_gate()
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        assert job.completed("algo-1") == STEPS
        assert "worker_failed" in job.reasons("algo-2")
        assert (job.base("algo-2") / "model" / "1.npz").exists()


@pytest.mark.parametrize("words", [("train",), ()], ids=["train", "no argument"])
def test_a_stop_is_a_save_and_the_next_run_goes_on(
    words: tuple[str, ...], cluster: Cluster, store: str, tmp_path: Path
) -> None:
    environment = {"KEEPSTEP_STORE": store}
    with Job(cluster, tmp_path / "1", "loop.py", {"steps": 10_000}, environment, words=words) as job:
        job.wait_for(lambda: job.completed("algo-1") >= 20, "step 20")
        job.stop(120)
        assert job.wait() == {"algo-1": 143, "algo-2": 143}, job.told()
        reached = job.completed("algo-1")
        assert job.completed("algo-2") == reached
        assert f"step {reached}" in job.failure("algo-1")
    with Job(cluster, tmp_path / "2", "loop.py", {"steps": reached + 20}, environment, words=words) as job:
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        first = min(event["entered"] for event in job.events("algo-1") if event["kind"] == "steps_sampled")
        assert reached <= first, job.told()
        assert job.completed("algo-1") == reached + 20


def tasks(job: Job, host: str) -> dict[str, int]:
    """Pid within its container of each process of the script, by its role and number."""
    config = "$(tr '\\0' '\\n' < $p/environ | grep ^TF_CONFIG=)"
    look = f"for p in /proc/[0-9]*; do echo $p $(tr '\\0' ' ' < $p/cmdline) {config}; done"
    found = {}
    for line in job.inside(host, "sh", "-c", look, check=False).stdout.splitlines():
        command, _, config = line.partition("TF_CONFIG=")
        if "keepstep_worker" in command and config:
            task = json.loads(config)["task"]
            found[f"{task['type']} {task['index']}"] = int(command.split()[0].rpartition("/")[2])
    return found


def test_a_worker_of_parameter_servers_is_replaced_in_its_place(cluster: Cluster, store: str, tmp_path: Path) -> None:
    """Chief and parameter servers keep their pids. Each host has its own disk; the checkpoints are on the chief's."""
    policy = {"KEEPSTEP_STORE": store}
    words = ("train", "--set", "launch.strategy=parameter_server")
    with Job(cluster, tmp_path, "served.py", {"epochs": 20}, policy, words=words) as job:
        epochs = job.base("algo-1") / "model" / "epoch"
        job.wait_for(lambda: epochs.exists() and int(epochs.read_text() or 0) >= 2, "epoch 2")
        before = tasks(job, "algo-1") | tasks(job, "algo-2")
        assert set(before) == {"chief 0", "ps 0", "ps 1", "worker 0"}
        job.inside("algo-2", "sh", "-c", f"kill -9 {before['worker 0']}")
        job.wait_for(
            lambda: tasks(job, "algo-2").get("worker 0", before["worker 0"]) != before["worker 0"], "another one"
        )
        after = tasks(job, "algo-1") | tasks(job, "algo-2")
        assert {name for name, pid in after.items() if pid != before[name]} == {"worker 0"}
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        assert "server_replaced" in job.reasons("algo-2")
        assert len((job.base("algo-1") / "model" / "started.jsonl").read_text().splitlines()) == 1


def test_a_parameter_server_that_is_lost_is_started_anew_from_the_chiefs_files(
    cluster: Cluster, store: str, tmp_path: Path
) -> None:
    environment = {"KEEPSTEP_STORE": store, "KEEPSTEP_POLICY": "default"}
    words = ("train", "--set", "launch.strategy=parameter_server")
    with Job(cluster, tmp_path, "served.py", {"epochs": 20}, environment, words=words) as job:
        epochs = job.base("algo-1") / "model" / "epoch"
        job.wait_for(lambda: epochs.exists() and int(epochs.read_text() or 0) >= 3, "epoch 3")
        job.inside("algo-2", "sh", "-c", f"kill -9 {tasks(job, 'algo-2')['ps 1']}")
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        first, second = map(json.loads, (job.base("algo-1") / "model" / "started.jsonl").read_text().splitlines())
        assert (first["epoch"], second["epoch"] >= 3) == (0, True)
        assert epochs.read_text() == "20"


def test_nobody_in_particular_trains_on_a_root_file_system_that_is_read_only(
    cluster: Cluster, store: str, tmp_path: Path
) -> None:
    """What is written to are /opt/ml and /tmp."""
    options = ("--user", f"{USER}:{USER}", "--read-only", "--tmpfs", "/tmp")
    environment = {"KEEPSTEP_STORE": store}
    with Job(cluster, tmp_path, "loop.py", GATED, environment, options=options, owner=USER) as job:
        job.wait_for(lambda: job.completed("algo-2") >= 20, "step 20")
        job.kill_worker("algo-2")
        job.open_gate()
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        assert job.completed("algo-1") == STEPS
        assert (job.base("algo-2") / "model" / "1.npz").stat().st_uid == USER
