"""An instance group that runs tf.data's service for two hosts that train, in three containers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.containers.jobs import GATE, Cluster, Job, read_events

EPOCHS, SAMPLES, GATE_AT = 4, 4000, 2
HOSTS = {"cpu": ["algo-1"], "gpu": ["algo-2", "algo-3"]}

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


def job_of(cluster: Cluster, folder: Path, store: str, **given: Any) -> Job:
    hyperparameters = {
        "epochs": EPOCHS,
        "keepstep_store": store,
        "sagemaker_distribution_instance_groups": ["gpu"],
        **given,
    }
    words = ("train", "--set", "launch.data_service=cpu", "--set", "restart.backoff.first=0s")
    hosts = ("algo-1", "algo-2", "algo-3")
    return Job(cluster, folder, "fed.py", hyperparameters, hosts=hosts, words=words, groups=HOSTS)


def epochs(job: Job, generation: int = 1) -> dict[int, Counter[int]]:
    """How often each sample was given to any rank, by epoch."""
    found: dict[int, Counter[int]] = {}
    for host in job.hosts:
        for path in (job.base(host) / "model").glob(f"samples-{generation}-*.jsonl"):
            for line in path.read_text().splitlines():
                told = json.loads(line)
                found.setdefault(told["epoch"], Counter()).update(told["given"])
                assert told["service"].startswith("grpc://algo-1:")
    return found


def feeders(job: Job, role: str) -> list[int]:
    """Pids of the processes of a part of the service, in its container."""
    sought = f"--feed [{role[0]}]{role[1:]}"  # which the words of this very look do not match
    look = f"for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q -- '{sought}' && basename $p; done; true"
    return [int(word) for word in job.inside("algo-1", "sh", "-c", look).stdout.split()]


def test_every_sample_of_an_epoch_goes_to_one_rank_and_a_dead_worker_of_the_service_doubles_none(
    cluster: Cluster, store: str, tmp_path: Path
) -> None:
    with job_of(cluster, tmp_path, store, gate=f"{GATE_AT}:{GATE}") as job:
        job.wait_for(lambda: len(epochs(job).get(1, ())) == SAMPLES, "the first epoch")
        (worker,) = feeders(job, "feeder")
        job.inside("algo-1", "sh", "-c", f"kill -9 {worker}")
        job.wait_for(lambda: [pid for pid in feeders(job, "feeder") if pid != worker], "another worker of the service")
        job.open_gate()
        assert job.wait() == dict.fromkeys(job.hosts, 0), job.told()
        assert "server_replaced" in job.reasons("algo-1")
        found = epochs(job)
        assert all(each["kind"] != "worker_started" for each in read_events(job.base("algo-1")))
        assert feeders_of_log(job) == {"dispatcher 0": 1, "feeder 0": 2}, job.told()
    assert sorted(found) == list(range(1, EPOCHS + 1))
    for epoch, samples in found.items():
        assert max(samples.values()) == 1, f"epoch {epoch}: {samples.most_common(3)}"
        if (
            epoch != GATE_AT
        ):  # what the dead worker had at hand is not given again: at most once is what the mode promises
            assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}: {len(samples)} samples"
    assert len(found[GATE_AT]) >= 50, "nothing was given before the gate"


def test_a_stop_leaves_the_service_running_until_all_have_stopped_at_one_step(
    cluster: Cluster, store: str, tmp_path: Path
) -> None:
    with job_of(cluster, tmp_path / "1", store, epochs=1000) as job:
        job.wait_for(lambda: len(epochs(job).get(1, ())) == SAMPLES, "the first epoch")
        job.stop(120)
        assert job.wait() == dict.fromkeys(job.hosts, 143), job.told()
        reached = job.completed("algo-2")
        assert job.completed("algo-3") == reached
        assert f"saved up to step {reached}" in job.failure("algo-2"), job.told()
        assert len(epochs(job)[reached]) == SAMPLES, "the agreed step, which is an epoch here, was fed to its end"
    with job_of(cluster, tmp_path / "2", store, epochs=reached + 1) as job:
        assert job.wait() == dict.fromkeys(job.hosts, 0), job.told()
        assert sorted(epochs(job, reached_generation(job))) == [reached + 1]


def reached_generation(job: Job) -> int:
    """The generation of the ranks that have written something."""
    paths = [path for host in job.hosts for path in (job.base(host) / "model").glob("samples-*.jsonl")]
    return max(int(path.stem.split("-")[1]) for path in paths)


def feeders_of_log(job: Job) -> Counter[str]:
    """How often each part of the service was started."""
    lines = [line for line in job.log("algo-1").splitlines() if "server starts: " in line]
    return Counter(line.partition("server starts: ")[2].partition(" of ")[0] for line in lines)
