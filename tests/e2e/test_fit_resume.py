"""A `fit` that is killed, or drained, and started again ends with the bits of the one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep_worker.wire import Progress, Seal
from tests.e2e.cluster import tf_configs
from tests.support.fake_agent import FakeAgent

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("fit_job.py")
PYTHON = os.environ.get("KEEPSTEP_TF_PYTHON", str(ROOT / ".venv-tf" / "bin" / "python"))
DEADLINE_S = 120
FLAVOURS = ["keras3", "tf_keras"]
LAST_STEPS = {
    "watched": 60, "several": 30, "executions": 40, "unknown_size": 40, "endless": 35, "failing": 42, "unlisted": 36,
    "collected": 36,
}  # fmt: skip
SEED = os.environ.get("KEEPSTEP_TEST_SEED", "")
KILLED = [(flavour, case) for flavour in FLAVOURS for case in LAST_STEPS if case != "several"]  # that is killed often
EVERYTHING = bool(os.environ.get("KEEPSTEP_TEST_ALL"))
SAMPLE = KILLED if EVERYTHING else sorted(random.Random(SEED).sample(KILLED, 2))
"""`make test` kills a seeded sample of the fits once and does the rest with Keras 3, `make test-resume` does it all."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


class Job:
    """One script, started as often as it takes, with the same slabs."""

    def __init__(self, folder: Path, flavour: str, case: str) -> None:
        self.agent, self.out, self._case = FakeAgent(), folder / "out.json", case
        self._log, self._arguments = folder / "log", [flavour, case, str(self.out)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seal: Seal | None = None, snapshot_every: int = 1, **more: str) -> None:
        """Start the script from a sealed slab, or from nothing, with more in its environment."""
        orders = {"restore_slab": seal.slab if seal else -1, "restore_step": seal.step if seal else 0}
        endpoint = self.agent.connect(snapshot_every=snapshot_every, **orders)
        more |= {"PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "keepstep_worker", str(JOB), *self._arguments],
                env={**os.environ, **self.agent.environment(endpoint, **more)},
                pass_fds=(self.agent.wire_fd, endpoint.fileno()),
                stdout=log,
                stderr=log,
            )
        endpoint.close()

    def wait_until(self, reached: Callable[[Progress], bool]) -> None:
        """Wait for a condition on the worker's progress."""
        assert self._process is not None
        give_up = time.monotonic() + DEADLINE_S
        while not reached(self.agent.wire.read_progress()):
            assert self._process.poll() is None, self.printed
            assert time.monotonic() < give_up, self.printed
            time.sleep(0.0005)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    @property
    def newest(self) -> Seal | None:
        return max(self.agent.wire.read_seals(), key=lambda seal: seal.step, default=None)

    def drain(self) -> int:
        """Ask for the drain as the agent does; returns the step that all must reach."""
        self.agent.order(hold=1)
        time.sleep(0.01)  # the agent's own wait: a step may have been entered just before
        target = self.agent.wire.read_progress().entered_step
        self.agent.order(drain_step=target)
        return target

    def wait_drained(self, step: int) -> None:
        assert self.agent.wait_for("drained") == {"kind": "drained", "step": step, "sealed": True}, self.printed
        assert self.newest is not None
        assert self.newest.step == step
        self.kill()

    def finish(self) -> Any:
        assert self._process is not None
        assert self._process.wait(DEADLINE_S) == 0, self.printed
        return json.loads(self.out.read_text())[self._case]

    def close(self) -> None:
        self.kill()
        self.agent.hang_up()
        for descriptor in (self.agent.wire_fd, *self.agent.slabs.values()):
            os.close(descriptor)

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[[str, str], Job]]:
    with contextlib.ExitStack() as stack:

        def make(flavour: str, case: str) -> Job:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            return stack.enter_context(contextlib.closing(Job(folder, flavour, case)))

        yield make


@pytest.fixture(scope="module", params=FLAVOURS if EVERYTHING else FLAVOURS[:1])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(flavour: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each case gives where there is no keepstep."""
    out = tmp_path_factory.mktemp(flavour) / "out.json"
    command = [PYTHON, str(JOB), flavour, ",".join([*LAST_STEPS, "shuffled", "sequences", "pauses", "once"]), str(out)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run(command, env=environment, check=True, timeout=2 * DEADLINE_S, capture_output=True)
    return json.loads(out.read_text())


@pytest.mark.parametrize(("flavour", "case"), SAMPLE, indirect=["flavour"])
def test_killed_at_any_step_it_ends_with_the_same_bits(
    make_job: Any, undisturbed: Any, flavour: str, case: str
) -> None:
    step = random.Random(f"{flavour} {case} {SEED}").randrange(1, LAST_STEPS[case] - 1)
    print(f"KEEPSTEP_TEST_SEED={SEED!r}: killed after step {step}")
    job = make_job(flavour, case)
    job.start()
    job.wait_until(lambda progress: progress.completed_step >= step)
    job.kill()
    job.start(job.newest)
    assert job.finish() == undisturbed[case], job.printed


def test_killed_again_and_again_between_snapshots_it_ends_with_the_same_bits(
    make_job: Any, undisturbed: Any, flavour: str
) -> None:
    job = make_job(flavour, "several")
    for step in (6, 13, 27):
        job.start(job.newest, snapshot_every=4)
        job.wait_until(lambda progress, step=step: progress.completed_step >= step)
        job.kill()
    job.start(job.newest, snapshot_every=4)
    assert job.finish() == undisturbed["several"], job.printed


@pytest.mark.parametrize(("case", "fits"), [("shuffled", 5), ("sequences", 4)])
def test_killed_in_later_epochs_it_goes_on_in_the_same_order_of_samples(
    make_job: Any, undisturbed: Any, flavour: str, case: str, fits: int
) -> None:
    """Once in each fit, at a step of its second epoch or later; between two fits as well."""
    draw = random.Random(f"{flavour} {SEED}")
    steps = sorted([18 * fit + draw.randrange(6, 18) for fit in range(fits)] + [36])
    print(f"KEEPSTEP_TEST_SEED={SEED!r}: killed after steps {steps}")
    job = make_job(flavour, case)
    for step in steps:
        job.start(job.newest)
        job.wait_until(lambda progress, step=step: progress.completed_step >= step)
        job.kill()
    job.start(job.newest)
    assert job.finish() == undisturbed[case], job.printed


def test_drained_between_two_snapshots_it_goes_on_at_the_next_step(
    make_job: Any, undisturbed: Any, flavour: str
) -> None:
    job = make_job(flavour, "executions")
    job.start(snapshot_every=1000)
    job.wait_until(lambda progress: progress.completed_step >= 5)
    job.wait_drained(job.drain())
    job.start(job.newest, snapshot_every=1000)
    assert job.finish() == undisturbed["executions"], job.printed


@pytest.mark.parametrize("place", ["validation", "epoch_end"])
def test_drained_beside_the_steps_it_saves_the_step_before(
    make_job: Any, undisturbed: Any, flavour: str, place: str
) -> None:
    """In a validation, which has overwritten the metrics by then, and after an epoch's end, which has been called."""
    job = make_job(flavour, "pauses")
    job.start(snapshot_every=1000, PAUSE_AT=place)
    job.wait_until(lambda _: job.out.with_name("out.json.reached").exists())
    step = job.drain()
    assert step == 24
    job.out.with_name("out.json.go").touch()
    job.wait_drained(step)
    job.start(job.newest, snapshot_every=1000)
    assert job.finish() == undisturbed["pauses"], job.printed


def test_drained_in_a_step_that_the_data_has_no_batch_for_it_saves_the_finished_fit(
    make_job: Any, undisturbed: Any, flavour: str
) -> None:
    job = make_job(flavour, "once")
    job.start(snapshot_every=1000, PAUSE_AT="data_end")
    job.wait_until(lambda progress: progress.entered_step == 11)
    step = job.drain()
    assert step == 11
    job.out.with_name("out.json.go").touch()
    job.wait_drained(step)
    job.start(job.newest, snapshot_every=1000)
    assert job.finish() == undisturbed["once"], job.printed


def test_started_again_after_its_end_it_gives_back_what_it_gave(make_job: Any, undisturbed: Any, flavour: str) -> None:
    job = make_job(flavour, "several")
    job.start(snapshot_every=1000)
    assert job.finish() == undisturbed["several"]
    job.out.unlink()
    job.start(job.newest, snapshot_every=1000)
    assert job.finish() == undisturbed["several"], job.printed
    assert [message["step"] for message in job.agent.of("restored")] == [LAST_STEPS["several"]]


def test_two_hosts_killed_at_any_step_end_with_the_same_bits(make_job: Any, flavour: str) -> None:
    jobs = [make_job(flavour, "watched") for _ in range(2)]
    start_together(jobs, [None, None])
    undisturbed = [job.finish() for job in jobs]
    if flavour == "keras3":  # each rank has BatchNorm statistics of its own; tf_keras averages them
        assert undisturbed[0]["variables"] != undisturbed[1]["variables"]
    jobs = [make_job(flavour, "watched") for _ in range(2)]
    start_together(jobs, [None, None])

    def sealed() -> list[dict[int, Seal]]:
        return [{seal.step: seal for seal in job.agent.wire.read_seals()} for job in jobs]

    def are_both() -> set[int]:
        return set.intersection(*map(set, sealed()))

    # a host with no slab to spare leaves out a step that the other one has sealed
    jobs[1].wait_until(lambda progress: progress.completed_step >= 17 and are_both())
    for job in jobs:
        job.kill()
    newest, step = sealed(), max(are_both())
    start_together(jobs, [each[step] for each in newest])
    assert [job.finish() for job in jobs] == undisturbed, jobs[0].printed


def start_together(jobs: list[Job], seals: list[Seal | None]) -> None:
    for job, seal, config in zip(jobs, seals, tf_configs(len(jobs)), strict=True):
        job.start(seal, TF_CONFIG=config)
