"""The exact drain: all workers seal one step, none goes on to its script, whenever the hold comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keepstep_worker import wire as wires
from keepstep_worker.slab import parse
from tests.support.fake_agent import FakeAgent, eventually

pytestmark = pytest.mark.integration
JOB = Path(__file__).with_name("drain_job.py")
RUNTIME = str(Path(wires.__file__).parent.parent)


class Worker:
    """A worker in a process of its own."""

    def __init__(self, agent: FakeAgent, *arguments: str, **orders: int) -> None:
        self.agent = agent
        endpoint = agent.connect(**orders)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keepstep_worker", str(JOB), *arguments],
            env={**os.environ, "PYTHONPATH": RUNTIME, **agent.environment(endpoint)},
            pass_fds=(agent.wire_fd, endpoint.fileno()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        endpoint.close()
        agent.wait_for("joined")

    def step(self, step: int) -> None:
        """Let a gated worker execute the step that it has entered."""
        eventually(lambda: self.progress().entered_step == step)
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        eventually(lambda: self.progress().completed_step == step)

    def progress(self) -> wires.Progress:
        return self.agent.wire.read_progress()

    def end(self) -> tuple[int, bytes]:
        """Kill it as the agent would; returns the exit status and what the script printed."""
        self.process.kill()
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output


@pytest.fixture
def agents():
    made = [FakeAgent(), FakeAgent()]
    yield made
    for agent in made:
        agent.close()


@pytest.fixture
def run():
    workers: list[Worker] = []

    def start(*arguments, **orders) -> Worker:
        workers.append(Worker(*arguments, **orders))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def sealed_step(agent: FakeAgent) -> int:
    file = agent.file(agent.newest().slab)
    place = parse(file, len(file))[0]["replicated/step"]
    return int.from_bytes(file[place.begin : place.end], "little")


def assert_drained(worker: Worker, step: int) -> None:
    assert worker.agent.wait_for("drained") == {"kind": "drained", "step": step, "sealed": True}
    progress = worker.progress()
    assert (progress.phase, progress.completed_step) == (wires.PHASE_DRAINED, step)
    assert (worker.agent.newest().step, sealed_step(worker.agent)) == (step, step)
    assert worker.end() == (-signal.SIGKILL, b"")


def test_a_hold_stops_before_the_next_step_until_the_drain_step_is_known(agents, run):
    agent = agents[0]
    worker = run(agent, "9", "gated")
    worker.step(1)
    eventually(lambda: worker.progress().entered_step == 2)
    agent.order(hold=1)
    worker.step(2)
    assert worker.progress().entered_step == 2
    agent.order(drain_step=2)
    assert_drained(worker, 2)


def test_a_worker_that_is_behind_runs_up_to_the_drain_step(agents, run):
    worker = run(agents[0], "9", "gated")
    eventually(lambda: worker.progress().entered_step == 1)
    agents[0].order(hold=1)
    agents[0].order(drain_step=4)
    for step in (1, 2, 3, 4):
        worker.step(step)
    assert_drained(worker, 4)


def test_the_last_step_is_a_drain_step_like_any_other(agents, run):
    worker = run(agents[0], "2", "gated")
    worker.step(1)
    eventually(lambda: worker.progress().entered_step == 2)
    agents[0].order(hold=1)
    worker.step(2)
    agents[0].order(drain_step=2)
    assert_drained(worker, 2)


def test_a_restored_step_is_sealed_already(agents, run):
    agent = agents[0]
    first = run(agent, "9", "gated", snapshot_every=1)
    first.step(1)
    agent.wait_for("sealed")
    first.end()
    seal = agent.newest()
    second = run(agent, "9", "gated", restore_slab=seal.slab, restore_step=1, hold=1, drain_step=1)
    assert_drained(second, 1)
    assert agent.newest() == seal


def test_without_an_interruption_the_script_goes_on(agents, run):
    worker = run(agents[0], "3", "gated", snapshot_every=2)
    for step in (1, 2, 3):
        worker.step(step)
    output, _ = worker.process.communicate(timeout=20)
    assert (worker.process.returncode, output) == (0, b"the script went on\n")
    assert sealed_step(agents[0]) == 3
    assert worker.progress().phase == wires.PHASE_FINISHED


def test_a_held_worker_ends_with_its_agent(agents, run):
    worker = run(agents[0], "9", "gated", hold=1)
    eventually(lambda: worker.progress().entered_step == 1)
    agents[0].hang_up()
    assert worker.process.wait(20) == 143


@pytest.mark.parametrize("after", [0, 1, 7, 60, 300])
def test_two_workers_drain_at_one_step_whenever_the_hold_comes(agents, run, after):
    workers = [run(agent, "1000000", snapshot_every=50) for agent in agents]
    eventually(lambda: all(worker.progress().completed_step >= after for worker in workers))
    for agent in agents:
        agent.order(hold=1)
    threading.Event().wait(0.01)  # what a worker had entered before it could see the hold is published by then
    target = max(worker.progress().entered_step for worker in workers)
    for agent in agents:
        agent.order(drain_step=target)
    for worker in workers:
        assert_drained(worker, target)
