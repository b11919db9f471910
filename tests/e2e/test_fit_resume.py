"""A `fit` that is killed, or drained, and started again ends with the bits of the one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_agent import FakeAgent

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("fit_job.py")
PYTHON = os.environ.get("KEEPSTEP_TF_PYTHON", str(ROOT / ".venv-tf" / "bin" / "python"))
DEADLINE_S = 60
LAST_STEPS = {"callbacks": 60, "several": 30, "executions": 40, "unknown_size": 40, "endless": 35}
CASES = [(flavour, case) for flavour in ("keras3", "tf_keras") for case in LAST_STEPS]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


class Job:
    """One script, started as often as it takes, with the same slabs."""

    def __init__(self, folder: Path, flavour: str, case: str) -> None:
        self.agent, self.out = FakeAgent(), folder / "out.json"
        self._log, self._arguments = folder / "log", [flavour, case, str(self.out)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, snapshot_every: int = 1, **more: str) -> None:
        """Start the script from the newest sealed slab, or from nothing, with more in its environment."""
        orders = {"restore_slab": -1, "restore_step": 0}
        seals = self.agent.wire.read_seals()
        if seals:
            orders = {"restore_slab": seals[-1].slab, "restore_step": seals[-1].step}
        endpoint = self.agent.connect(snapshot_every=snapshot_every, **orders)
        more |= {"PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment = self.agent.environment(endpoint, **more)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "keepstep_worker", str(JOB), *self._arguments],
                env={**os.environ, **environment},
                pass_fds=(self.agent.wire_fd, endpoint.fileno()),
                stdout=log,
                stderr=log,
            )
        endpoint.close()

    def wait_until(self, reached: Any) -> None:
        """Wait for a condition on the worker's progress, or for its end."""
        assert self._process is not None
        give_up = time.monotonic() + DEADLINE_S
        while not reached(self.agent.wire.read_progress()) and self._process.poll() is None:
            assert time.monotonic() < give_up, self.printed
            time.sleep(0.0005)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def drain(self) -> int:
        """Ask for the drain as the agent does; returns the step that all must reach."""
        self.agent.order(hold=1)
        time.sleep(0.01)  # the agent's own wait: a step may have been entered just before
        target = self.agent.wire.read_progress().entered_step
        self.agent.order(drain_step=target)
        return target

    def wait_drained(self, step: int) -> None:
        assert self.agent.wait_for("drained") == {"kind": "drained", "step": step, "sealed": True}, self.printed
        assert self.agent.newest().step == step
        self.kill()

    def close(self) -> None:
        self.kill()
        self.agent.hang_up()
        for descriptor in (self.agent.wire_fd, *self.agent.slabs.values()):
            os.close(descriptor)

    def finish(self) -> Any:
        assert self._process is not None
        assert self._process.wait(DEADLINE_S) == 0, self.printed
        return json.loads(self.out.read_text())

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield lambda flavour, case: stack.enter_context(contextlib.closing(Job(tmp_path, flavour, case)))


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the script gives without keepstep; computed once for each case."""

    def run(flavour: str, case: str) -> Any:
        if (flavour, case) not in KNOWN:
            out = tmp_path_factory.mktemp("undisturbed") / "out.json"
            command = [PYTHON, str(JOB), flavour, case, str(out)]
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
            subprocess.run(command, env=environment, check=True, timeout=DEADLINE_S, capture_output=True)
            KNOWN[flavour, case] = json.loads(out.read_text())
        return KNOWN[flavour, case]

    return run


KNOWN: dict[tuple[str, str], Any] = {}


@pytest.mark.parametrize(("flavour", "case"), CASES)
def test_killed_at_any_step_it_ends_with_the_same_bits(
    make_job: Any, undisturbed: Any, flavour: str, case: str
) -> None:
    draw = random.Random(f"{flavour} {case} {os.environ.get('KEEPSTEP_TEST_SEED', '')}")
    job = make_job(flavour, case)
    for step in sorted(draw.sample(range(1, LAST_STEPS[case] - 1), 2)):
        job.start()
        job.wait_until(lambda progress, step=step: progress.completed_step >= step)
        job.kill()
        print(f"killed after step {step}, sealed were {[seal.step for seal in job.agent.wire.read_seals()]}")
    job.start()
    assert job.finish() == undisturbed(flavour, case), job.printed


@pytest.mark.parametrize("flavour", ["keras3", "tf_keras"])
def test_drained_between_two_snapshots_it_goes_on_at_the_next_step(
    make_job: Any, undisturbed: Any, flavour: str
) -> None:
    job = make_job(flavour, "executions")
    job.start(snapshot_every=1000)
    job.wait_until(lambda progress: progress.completed_step >= 5)
    job.wait_drained(job.drain())
    job.start(snapshot_every=1000)
    assert job.finish() == undisturbed(flavour, "executions"), job.printed


@pytest.mark.parametrize("flavour", ["keras3", "tf_keras"])
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
    job.start(snapshot_every=1000)
    assert job.finish() == undisturbed(flavour, "pauses"), job.printed


@pytest.mark.parametrize("flavour", ["keras3", "tf_keras"])
def test_started_again_after_its_end_it_gives_back_what_it_gave(make_job: Any, undisturbed: Any, flavour: str) -> None:
    job = make_job(flavour, "several")
    job.start(snapshot_every=1000)
    job.finish()
    job.out.unlink()
    job.start(snapshot_every=1000)
    given = job.finish()
    assert given["results"] == undisturbed(flavour, "several")["results"], job.printed
    assert [message["step"] for message in job.agent.of("restored")] == [job.agent.newest().step]
