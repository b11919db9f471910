"""Horovod itself in two containers, in an image without sshd: as the platform's own switch asks for it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.containers.engine import HOROVOD, Engine, horovod_images
from tests.containers.jobs import GATE, Cluster, Job

STEPS, GATE_AT = 60, 40
SWITCHES = {
    "sagemaker_mpi_enabled": True,
    "sagemaker_mpi_num_of_processes_per_host": 2,
    "sagemaker_mpi_custom_mpi_options": "-x USERS_OWN=1 --NCCL_DEBUG WARN",
}

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    started = time.monotonic()
    horovod_images(engine)
    print(f"images with Horovod: built in {time.monotonic() - started:.0f} s")
    return HOROVOD


def job_of(cluster: Cluster, folder: Path, store: str, image: str, **given: Any) -> Job:
    hyperparameters = {**SWITCHES, "steps": STEPS, "keepstep_store": store, **given}
    return Job(cluster, folder, "ring.py", hyperparameters, image=image)


def ranks(job: Job, generation: int) -> dict[int, dict[str, Any]]:
    """What each rank of a generation has said of itself, on whichever host."""
    found = {}
    for host in job.hosts:
        for path in (job.base(host) / "model" / "ranks").glob(f"{generation}-*.json"):
            found[int(path.stem.partition("-")[2])] = {"host": host, **json.loads(path.read_text())}
    return found


def programs(job: Job, host: str) -> set[str]:
    """The names of all processes in a host's container."""
    return set(job.inside(host, "sh", "-c", "cat /proc/[0-9]*/comm 2>/dev/null || true").stdout.split())


def test_a_rank_that_is_killed_costs_no_committed_step(
    cluster: Cluster, store: str, image: str, tmp_path: Path
) -> None:
    with job_of(cluster, tmp_path, store, image, gate=f"{GATE_AT}:{GATE}") as job:
        job.wait_for(lambda: all(job.completed(host) >= GATE_AT - 1 for host in job.hosts), "the gate")
        first = ranks(job, 1)
        assert {rank: (each["host"], each["SM_CURRENT_HOST"], each["local"]) for rank, each in first.items()} == {
            rank: (f"algo-{1 + rank // 2}", f"algo-{1 + rank // 2}", rank % 2) for rank in range(4)
        }
        for host in job.hosts:
            assert "sshd" not in programs(job, host)
            assert job.inside(host, "which", "sshd", "ssh", check=False).returncode != 0
        assert "orted" in programs(job, "algo-2")
        job.inside("algo-2", "sh", "-c", f"kill -9 {first[3]['pid']}")
        job.wait_for(lambda: len(ranks(job, 2)) == 4, "a second generation")
        job.open_gate()
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        notes = " ".join(job.log(host) for host in job.hosts)
        assert "restart allowed: killed on algo-2 rank 3 at step 40 by signal 9" in notes, job.told()
        resumed = re.search(r"rank 0 of generation 2 at step (\d+)", notes)
        assert resumed is not None and 0 < int(resumed[1]) < GATE_AT, job.told()
        assert "rank 3 is done at step 60" in notes, job.told()


def test_a_stop_is_a_save_and_the_next_job_goes_on(cluster: Cluster, store: str, image: str, tmp_path: Path) -> None:
    with job_of(cluster, tmp_path / "1", store, image, steps=10_000) as job:
        job.wait_for(lambda: job.completed("algo-1") >= 20, "step 20")
        job.stop(120)
        assert job.wait() == {"algo-1": 143, "algo-2": 143}, job.told()
        reached = job.completed("algo-1")
        assert job.completed("algo-2") == reached
        assert f"step {reached}" in job.failure("algo-1")
    with job_of(cluster, tmp_path / "2", store, image, steps=reached + 20) as job:
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        first = min(event["entered"] for event in job.events("algo-1") if event["kind"] == "steps_sampled")
        assert reached <= first, job.told()
        assert job.completed("algo-1") == reached + 20
