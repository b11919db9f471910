"""What a training can do without: it goes on, with an alarm, and what was missed is made up for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.commit import read_head
from tests.support.container import LOOP, Container
from tests.support.proxy import TcpProxy
from tests.support.s3 import CREDENTIALS, bucket_store, s3_server

OUTAGE_S = 120.0 if os.environ.get("KEEPSTEP_TEST_ALL") else 0.0
"""How much longer than training needs to go on a store is away."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path) as container:
        container.fill()
        yield container


def blocked_output(container: Container) -> None:
    container.write("output", "a file\n")


def odd_hyperparameters(container: Container) -> None:
    text = '{"sagemaker_program": "train.py", "epochs": 3, "layers": [1], "on": null}'
    container.write("input/config/hyperparameters.json", text)


HARMLESS: dict[str, tuple[Callable[[Container], object], str]] = {
    "store: none": (lambda c: c.options.extend(["--store", "none"]), ""),
    "hyperparameters: not strings": (odd_hyperparameters, "--epochs 3 --layers [1]"),
    "output: a file": (blocked_output, "the journal goes to"),
    "output: on a full disk": (lambda c: c.full_disks.append(c.folder("output")), "No space left on device"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_can_be_done_without_stops_nothing(container, name):
    prepare, said = HARMLESS[name]
    container.write("code/train.py", "import sys\nprint('the script ran', *sys.argv[1:])\n")
    prepare(container)
    assert container.run() == 0, container.output()
    assert "the script ran" in container.output() and said in container.output()
    assert "Traceback" not in container.output()


def train(container: Container, store: str, plan: str = "pass", blob_bytes: int = 0, grace: str = "5s") -> None:
    """Start a training that ends when a file says so, and wait for its first commit."""
    container.write("code/train.py", LOOP.replace("PLAN", plan))
    container.write("blob", str(blob_bytes))
    for setting in ("checkpoint.snapshot_every=4 steps", "checkpoint.every=8 steps", f"interruption.grace={grace}"):
        container.options += ["--set", setting]
    container.options += ["--store", store]
    container.start()
    container.wait_for(lambda: container.metric("keepstep_durable_step"), "commit")


def fresh_bucket(endpoint: str) -> str:
    """A bucket of this test alone: servers of one process share what they keep."""
    bucket = f"b{uuid.uuid4().hex[:12]}"
    bucket_store(endpoint, bucket)
    return bucket


def trains_on(container: Container) -> float:
    """That steps go on, and the durable step does not, once the alarm was raised; returns the durable step."""
    container.wait_for(lambda: container.metric("keepstep_store_available") == 0.0, "alarm")
    durable, step = container.metric("keepstep_durable_step"), container.metric("keepstep_step")
    container.wait_for(lambda: (container.metric("keepstep_step") or 0) > step + 100, "further steps")
    assert container.metric("keepstep_durable_step") == durable
    return durable


def turn_into_a_file(container: Container) -> None:
    (container.base / "store").rename(container.base / "away")
    container.write("store", "a file\n")


def let_it_fill_the_disk(container: Container) -> None:
    container.write("fill", "")


FILL = """
    if (here / "fill").exists() and not (here / "store" / "more").exists():
        with open(here / "store" / "more", "wb", buffering=0) as more:
            try:
                while True:
                    more.write(bytes(4096))
            except OSError:
                print("the disk is full")
"""


@pytest.mark.parametrize(
    ("spoil", "disk", "alarm"),
    [(turn_into_a_file, False, "Not a directory"), (let_it_fill_the_disk, True, "No space left on device")],
    ids=["not a directory any more", "full"],
)
def test_training_goes_on_where_its_store_is_lost(container, spoil, disk, alarm):
    store = container.folder("store")
    if disk:
        container.small_disks.append(store)
    train(container, str(store), FILL.strip())
    spoil(container)
    durable = trains_on(container)
    container.write("enough", "")
    assert container.wait() == 0, container.output()
    assert container.failure() is None
    alarms = [line for line in container.said() if "store refuses" in line and alarm in line]
    assert alarms and str(store) in alarms[0]
    assert "Traceback" not in container.output() and durable > 0


def test_what_an_absent_store_missed_is_made_up_for(container):
    endpoint = container.kept.enter_context(contextlib.contextmanager(s3_server)())
    bucket = fresh_bucket(endpoint)
    with TcpProxy("127.0.0.1", int(endpoint.rpartition(":")[2])) as proxy:
        container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.endpoint}
        train(container, f"s3://{bucket}/job")
        proxy.cut()
        durable = trains_on(container)
        threading.Event().wait(OUTAGE_S)  # how long the fault lasts, not a wait for anything
        assert trains_on(container) == durable
        proxy.restore()
        container.wait_for(lambda: container.metric("keepstep_store_available") == 1.0, "store")
        container.wait_for(lambda: (container.metric("keepstep_durable_step") or 0) > durable, "newer commit")
        container.write("enough", "")
        assert container.wait() == 0, container.output()
    head = read_head(bucket_store(endpoint, bucket, "job", make=False), "local").head
    assert head is not None
    (ended,) = (event for event in container.events() if event["kind"] == "worker_exited")
    assert head.step == max(seal["step"] for seal in ended["seals"])
    assert "store unavailable" in container.output() and "store recovered" in container.output()


BLOB_BYTES = 4 << 20
LEFT_S = 10.0
"""From the end of the grace to the SIGKILL, as the default policy has it: 110 s of SageMaker's 120."""


@pytest.mark.parametrize(("delay_s", "grace_s", "fits"), [(0.002, 45, True), (1.0, 10, False)], ids=["room", "no room"])
def test_only_what_can_be_committed_within_the_grace_is(container, delay_s, grace_s, fits):
    """The line to the store is so slow that the newest step can, or can not be committed before the deadline.

    What was committed before is of an earlier run, so that nothing is under way when this one is interrupted.
    """
    endpoint = container.kept.enter_context(contextlib.contextmanager(s3_server)())
    bucket = fresh_bucket(endpoint)
    with TcpProxy("127.0.0.1", int(endpoint.rpartition(":")[2])) as proxy:
        container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.endpoint}
        train(container, f"s3://{bucket}/job", blob_bytes=BLOB_BYTES, grace=f"{grace_s}s")
        container.write("enough", "")
        assert container.wait() == 0, container.output()
        store = bucket_store(endpoint, bucket, "job", make=False)
        before = read_head(store, "local").head
        (container.base / "enough").unlink()
        container.options += ["--set", "checkpoint.every=1000000 steps"]
        container.start()
        container.wait_for(lambda: (container.metric("keepstep_step") or 0) > before.step, "steps")
        proxy.delay(delay_s)  # for each 64 KiB: the blob takes a minute, or a moment
        container.signal()
        assert container.wait(grace_s + LEFT_S) == 143, container.output()
    head = read_head(store, "local").head
    assert f"saved up to step {head.step}" in container.failure()
    spent = "the grace did not last" in container.failure()
    assert spent != fits
    drained = [event["entered"] for event in container.events() if event["kind"] == "entered_sampled"]
    assert drained[-1] > before.step
    assert head.step == drained[-1] if fits else head == before


def test_a_store_that_stays_away_costs_no_more_than_the_grace(container):
    """The training is over, and its last commit can not be made: that is said, and the exit code is the training's."""
    endpoint = container.kept.enter_context(contextlib.contextmanager(s3_server)())
    bucket = fresh_bucket(endpoint)
    with TcpProxy("127.0.0.1", int(endpoint.rpartition(":")[2])) as proxy:
        container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.endpoint}
        train(container, f"s3://{bucket}/job")
        proxy.cut()
        trains_on(container)
        container.write("enough", "")
        assert container.wait() == 0, container.output()
    assert "store unavailable" in container.output() and "store recovered" not in container.output()


def test_a_worker_that_a_signal_stopped_is_looked_at_before_it_is_killed(container, tmp_path):
    """It can not be drained; what is sealed is saved, and where it stood is known."""
    container.write("code/train.py", LOOP.replace("PLAN", "pass"))
    container.options += ["--store", str(tmp_path / "store"), "--set", "interruption.grace=15s"]
    container.options += ["--set", "interruption.script_grace=1s"]
    container.start()
    container.wait_for(lambda: "snapshot_sealed" in container.reasons(), "snapshot")
    started = [event for event in container.events() if event["kind"] == "worker_started"]
    os.kill(started[-1]["pid"], signal.SIGSTOP)
    container.signal()
    assert container.wait() == 143
    (stacks,) = container.base.glob("output/data/keepstep/*/stacks/generation-1-rank-0.txt")
    assert "stopped by a signal" in stacks.read_text()
    assert "train.py" in stacks.read_text()
