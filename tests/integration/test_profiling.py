"""Real workers that are looked at while they train: what is kept where something can not be had, what is given up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.clock import Clock
from keepstep.adapters.prometheus import Metrics
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.probing import Probing
from keepstep.app.profiling import Profiling
from keepstep.app.sampling import Sampler
from keepstep.app.storing import Storing
from keepstep.core.actions import CollectStacks, ProfileWorker
from keepstep.core.events import StacksCollected, WorkerProfiled
from keepstep.core.policy import Policy
from keepstep.core.profiles import Profile, Straggler
from keepstep.core.splits import Part, Split
from keepstep_worker import wire as wires
from tests.support.keepers import KeepsNothing

pytestmark = pytest.mark.integration
RUNTIME = str(Path(wires.__file__).parent.parent)
WORKER = "one.0"

TRAINS = """
import sys, time
from keepstep_worker.session import Session

def train_step():
    time.sleep(0.01)

session, step = Session.current(), 0
session.join("loop")
while True:
    step += 1
    session.enter_step(step)
    train_step()
    session.complete_step(step)
    if step == int(sys.argv[1]):
        break
"""

FOUND = Straggler("algo-1", 0, Part.COMPUTE, 2.0, 0.01, 0.03, 0.3, 40, 1.0, ("cpu held back by its quota 38 %",))
SPLIT = Split(60, 5, 0.0, 0.02, 0.01, 0.0)
PROFILE = Profile(1, 1_000.0, FOUND, "algo-2", SPLIT, SPLIT, ("0:compute",))
ACTION = ProfileWorker("profile:1:1", WORKER, 1, "algo-1", 0, PROFILE)


class Host:
    """A host with a worker of its own and what looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.logged = folder / "algo-1", [], []
        self.heard = asyncio.Event()
        self.link = WorkerLink(KeepsNothing(), {}, self._hear)
        storing = Storing("job", None, Policy(), self.told.append, self.logged.append)
        self.profiling = Profiling(self.link, storing, self.folder, self.told.append, self.logged.append)
        self.process: subprocess.Popen[bytes] | None = None

    def _hear(self, worker_id: str, message: dict[str, Any]) -> None:
        if message["kind"] == "joined":
            self.heard.set()
        if message["kind"] == "profiled":
            self.profiling.on_profiled(worker_id, message)

    async def train(self, steps: int = 0) -> None:
        """Start a worker, and wait until it trains."""
        await self.start([sys.executable, "-c", TRAINS, str(steps)])
        await self.heard.wait()

    async def start(self, command: list[str], **more: str) -> None:
        """Start a worker, with more in its environment."""
        await self.link.open()
        self.link.order(generation=1)
        fds, environment, handed_over = self.link.prepare(WORKER)
        told = {"GENERATION": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PARENT_PID": str(os.getpid())}
        environment |= {f"KEEPSTEP_{name}": value for name, value in told.items()} | {"PYTHONPATH": RUNTIME}
        self.process = subprocess.Popen(command, env={**os.environ, **environment, **more}, pass_fds=fds)
        handed_over()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.link.hang_up()

    @property
    def left(self) -> list[str]:
        """What there is in the folder of profiles."""
        return sorted(str(path.relative_to(self.folder / "profiles")) for path in self.folder.rglob("*.*"))


def played(folder: Path, play: Callable[[Host], Any]) -> Host:
    """A host on which something was played."""

    async def run() -> Host:
        host = Host(folder)
        try:
            await play(host)
        finally:
            host.stop()
        return host

    return asyncio.run(run())


def test_a_script_without_tensorflow_is_sampled_alone(tmp_path):
    async def play(host: Host) -> None:
        await host.train()
        await host.profiling.perform(ACTION)
        before = host.link.progress().completed_step
        async with asyncio.timeout(20):
            while host.link.progress().completed_step == before:
                await asyncio.to_thread(os.sched_yield)

    host = played(tmp_path, play)
    name = "generation-1-step-60-rank-0"
    assert host.left == [f"{name}/py-spy.speedscope.json", f"{name}/report.json"]
    folder = host.folder / "profiles" / name
    trouble = "no TensorFlow profile: LookupError: the script has not imported TensorFlow"
    assert host.told == [
        WorkerProfiled("profile:1:1", WORKER, str(folder), ("py-spy.speedscope.json",), (trouble,)),
    ]
    frames = json.loads((folder / "py-spy.speedscope.json").read_text())["shared"]["frames"]
    assert "train_step" in {frame["name"] for frame in frames}
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"].startswith(
        "algo-1 rank 0 works 2.00 times as long as its peers: compute takes 10.0 ms more"
    )
    assert "cpu held back by its quota 38 %" in report["verdict"]
    assert report["this"] == {"host": "algo-1", "rank": 0, "is": "slow"} and report["peer"] == "algo-2"
    assert (report["files"], report["trouble"]) == (["py-spy.speedscope.json"], [trouble])


def test_of_a_worker_that_is_gone_nothing_is_kept(tmp_path):
    async def play(host: Host) -> None:
        await host.train(steps=1)
        assert host.process is not None
        await asyncio.to_thread(host.process.wait)
        host.link.hang_up()
        await host.profiling.perform(ACTION)

    host = played(tmp_path, play)
    (event,) = host.told
    assert isinstance(event, WorkerProfiled)
    assert (event.folder, event.files) == ("", ())
    assert event.trouble[0].startswith("no sample of its Python stacks: ")
    assert event.trouble[1] == "no TensorFlow profile: the worker has ended"
    assert host.left == []


def test_of_a_worker_that_ends_when_its_stacks_are_wanted_none_are_kept(tmp_path):
    async def play(host: Host) -> None:
        post = host.told.append
        sampler = Sampler(host.link, Clock(), metrics, post, lambda worker_id, message: None)
        storing = Storing("job", None, Policy(), post, host.logged.append)
        probing = Probing(host.link, sampler, storing, host.folder, post, host.logged.append)
        await host.train(steps=1)
        assert host.process is not None
        await asyncio.to_thread(host.process.wait)
        await probing.collect(CollectStacks("stacks:one.0", WORKER, 1, 0, 1.0), tmp_path / "none")

    with contextlib.closing(Metrics("127.0.0.1", 0, ())) as metrics:
        host = played(tmp_path, play)
    assert [event.kind for event in host.told if isinstance(event, StacksCollected)] == ["stacks_collected"]
    assert "rank 0 stood still, and ended before its stacks were read" in host.logged
    assert not list(tmp_path.rglob("*.txt"))


def test_a_folder_that_can_not_be_written_is_told_of(tmp_path):
    (tmp_path / "algo-1").write_text("a file where the folder should be")

    async def play(host: Host) -> None:
        await host.train()
        await host.profiling.perform(ACTION)

    (event,) = played(tmp_path, play).told
    assert isinstance(event, WorkerProfiled)
    assert event.folder == "" and event.trouble[0].startswith("it can not be kept: ")


def test_the_end_of_the_job_waits_for_no_profile(tmp_path):
    async def play(host: Host) -> None:
        await host.train()
        under_way = asyncio.create_task(host.profiling.perform(ACTION))
        async with asyncio.timeout(20):
            while not host.left:  # until py-spy is at work, or about to be
                await asyncio.to_thread(os.sched_yield)
        host.profiling.close()
        await under_way

    host = played(tmp_path, play)
    assert (host.told, host.left) == ([], [])
