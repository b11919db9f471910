"""The real SageMaker SDK, in both its versions, runs the image in its local mode on two hosts.

A worker is killed on the way, or the job is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from keepstep import kernel
from tests.containers.engine import ROOT
from tests.containers.jobs import DEADLINE_S, GATE, SCRIPTS, Cluster, kill_worker_in, read_events

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

STEPS = 80
HERE = Path(__file__).parent
_POLL_S = 0.1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The code, as a user has it in a folder."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__")))


@contextlib.contextmanager
def sdk_run(cluster: Cluster, folder: Path, venv: str, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the scripts beside this file with that SDK; docker and its compose are Debian's."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "KEEPSTEP_"))},
        **cluster.engine.environment,
        **cluster.credentials,
        "AWS_ENDPOINT_URL_S3": cluster.endpoint,  # version 2 hands its own on to the containers
        "PYTHONPATH": str(ROOT / "runtime"),
        "PATH": f"/usr/bin:{os.environ['PATH']}",
        "HOME": str(folder),
    }
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(
            [str(ROOT / venv / "bin" / "python"), *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield run
    finally:
        for pid in (run.pid, *kernel.family(kernel.processes(), [run.pid])):
            kernel.kill(pid)
        run.wait(DEADLINE_S)
        for name in names_of(cluster):  # which no SDK that was killed has taken down
            cluster.engine.run("rm", "--force", "--volumes", name, check=False)


def wait_for(run: subprocess.Popen[bytes], look: Callable[[], object], folder: Path, what: str) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not look():
        told = (folder / "output").read_text(errors="replace")[-6000:]
        assert run.poll() is None, f"it has ended before {what}:\n{told}"
        assert time.monotonic() < give_up, f"no {what}:\n{told}"
        time.sleep(_POLL_S)


def names_of(cluster: Cluster) -> list[str]:
    """The containers that run, in the order of their hosts."""
    listed = cluster.engine.ask("ps", "--format", "{{.Names}}").splitlines()
    return sorted((name for name in listed if "algo-" in name), key=lambda name: name.partition("algo-")[2])


def train(
    cluster: Cluster, folder: Path, venv: str, words: Sequence[str], disturb: Callable[[list[str], Path], object] | None
) -> tuple[int, str]:
    """One run of an SDK, its folders below the last word; gives exit code and output.

    It is disturbed after step 20, with the containers and the folder of host 2.
    """
    root = Path(words[-1])
    root.mkdir(parents=True)

    def second() -> Path:
        """Where host 2's /opt/ml is."""
        return next((path for path in root.glob("**/algo-2*") if path.is_dir()), root)

    def completed() -> int:
        return max((event.get("completed", 0) for event in read_events(second())), default=0)

    with sdk_run(cluster, folder, venv, words) as run:
        if disturb is not None:
            wait_for(run, lambda: completed() >= 20, folder, "step 20")
            disturb(names_of(cluster), second())
        try:
            code = run.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{(folder / 'output').read_text()[-6000:]}") from None
    return code, (folder / "output").read_text(errors="replace")


@pytest.fixture
def environment(cluster: Cluster, store: str) -> dict[str, str]:
    """What version 3 is to give the containers."""
    own = {"AWS_ENDPOINT_URL": cluster.endpoint, "KEEPSTEP_STORE": store, "KEEPSTEP_JOB_NAME": "digits"}
    return own | dict(cluster.credentials)


def words_of(
    way: str, source: Path, root: Path, steps: int, environment: dict[str, str], gate: str = ""
) -> tuple[str, list[str]]:
    """The environment to run in, and the command line; version 2 gives its own credentials and its own S3."""
    if way == "version 2":
        more = {name: value for name, value in environment.items() if "KEY" not in name and "ENDPOINT" not in name}
        return ".venv-sdk2", [str(HERE / "sdk2_job.py"), str(source), str(steps), gate, json.dumps(more), str(root)]
    words = [str(HERE / "sdk3_job.py"), way, str(source), str(steps), gate, json.dumps(environment), str(root)]
    return ".venv-sdk", words


@pytest.mark.parametrize("way", ["command", "image", "distributed", "version 2"])
def test_a_worker_that_is_killed_is_survived(
    way: str, cluster: Cluster, environment: dict[str, str], source: Path, tmp_path: Path
) -> None:
    venv, words = words_of(way, source, tmp_path / "root", STEPS, environment, f"30:{GATE}")

    def kill(names: list[str], second: Path) -> None:
        kill_worker_in(cluster.engine, names[1], second)
        for name in names:
            cluster.engine.run("exec", name, "touch", GATE)

    code, told = train(cluster, tmp_path, venv, words, kill)
    assert code == 0, told[-6000:]
    assert "worker failed: rank 1: killed" in told
    assert f"checkpoint committed: step {STEPS}" in told
    assert ("passes no SIGTERM on" in told) == (way == "distributed"), told[-6000:]


@pytest.mark.parametrize("way", ["command", "image", "version 2"])
def test_a_stop_is_a_save_and_the_next_run_goes_on(
    way: str, cluster: Cluster, environment: dict[str, str], source: Path, tmp_path: Path
) -> None:
    """In each way in which keepstep is process 1."""
    venv, words = words_of(way, source, tmp_path / "1", 10_000, environment)
    code, told = train(
        cluster, tmp_path, venv, words, lambda names, _: cluster.engine.run("stop", "--time", "120", *names)
    )
    assert code != 0
    reached = int(re.findall(r"checkpoint committed: step (\d+)", told)[-1])
    assert reached >= 20
    venv, words = words_of(way, source, tmp_path / "2", reached + 20, environment)
    code, told = train(cluster, tmp_path, venv, words, None)
    assert code == 0, told[-6000:]
    assert re.search(rf"world starts: generation \d+ at step {reached}\b", told), told[-6000:]
    assert f"checkpoint committed: step {reached + 20}" in told
