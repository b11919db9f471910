"""Whole jobs in containers, as the platform starts and stops them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.jobs import Cluster, Job

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

STEPS = 80
USER = 4321
"""Has no name, no home and no right of its own."""


def test_a_worker_that_is_killed_is_survived(cluster: Cluster, store: str, tmp_path: Path) -> None:
    with Job(cluster, tmp_path, "loop.py", {"steps": STEPS}, {"KEEPSTEP_STORE": store}) as job:
        job.wait_for(lambda: job.completed("algo-2") >= 20, "step 20")
        assert job.inside("algo-1", "/opt/keepstep/entrypoints/healthcheck").stderr == ""
        job.kill_worker("algo-2")
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


def test_nobody_in_particular_trains_on_a_root_file_system_that_is_read_only(
    cluster: Cluster, store: str, tmp_path: Path
) -> None:
    """What is written to are /opt/ml and /tmp."""
    options = ("--user", f"{USER}:{USER}", "--read-only", "--tmpfs", "/tmp")
    environment = {"KEEPSTEP_STORE": store}
    with Job(cluster, tmp_path, "loop.py", {"steps": STEPS}, environment, options=options, owner=USER) as job:
        job.wait_for(lambda: job.completed("algo-2") >= 20, "step 20")
        job.kill_worker("algo-2")
        assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.told()
        assert job.completed("algo-1") == STEPS
        assert (job.base("algo-2") / "model" / "1.npz").stat().st_uid == USER
