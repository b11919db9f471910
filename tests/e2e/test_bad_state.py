"""A state that is whole and no good all the same: it is given up for an older one, or not saved at all."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun, differences

WRONG_FROM = 40
SNAPSHOTS = ("--set", "checkpoint.snapshot_every=4 steps", "--set", "checkpoint.every=8 steps")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_state_with_nan_counts_against_its_snapshot(tmp_path: Path) -> None:
    """A sound one is committed before; the NaN is in what all hosts hold when one of their workers is killed.

    Half a second ahead it is said which step will be committed: at a tenth of a second each, one long before the gate.
    """
    with LocalRun(tmp_path / "quiet", "loop.py", ["--steps=72"], SNAPSHOTS) as quiet:
        assert quiet.wait() == 0, quiet.told()
    committed, room, held = tmp_path / "committed", tmp_path / "room", tmp_path / "held"
    gates = [f"--gate=48:{committed}", f"--gate=51:{room}", f"--gate=54:{held}"]
    spoilt = ["--steps=72", "--pause=0.1", "--spoil=50", *gates]
    with LocalRun(tmp_path / "hurt", "loop.py", spoilt, SNAPSHOTS) as hurt:
        hurt.wait_for(lambda: hurt.events("checkpoint_committed"), "sound state to go on from")
        committed.touch()
        hurt.wait_for(lambda: all(has_seen(hurt, host, 50) for host in hurt.names), "room for the bad state")
        room.touch()
        hurt.wait_for(lambda: all(52 in sealed(hurt, host) for host in hurt.names), "bad state on each host")
        os.kill(hurt.events("worker_started", "algo-2")[0]["pid"], signal.SIGKILL)
        held.touch()
        assert hurt.wait() == 0, hurt.told()
    told = [detail for host in hurt.names for reason, detail in hurt.notes(host) if reason == "state_distrusted"]
    assert told == ["step 52, of which 2 worlds died at once"], hurt.told()
    assert hurt.summary()["restarts"] == 3, "for the kill, and for each world that died"
    logs = [hurt.log(host) for host in hurt.names]
    assert any("step 53, the first from the state of step 52, has left NaN in model/" in log for log in logs)
    assert differences(hurt.results(), quiet.results()) == []


@pytest.mark.parametrize(
    ("rank", "key"),
    [
        (0, "replicated/model/sequential/dense/kernel"),
        (2, "replicated/optimizer/adam/sequential_dense_kernel_velocity"),
    ],
)
def test_a_bit_that_is_wrong_in_one_slab_is_named_and_never_committed(tmp_path: Path, rank: int, key: str) -> None:
    """Two of three hosts agree, so that it is known whose is wrong; a sound one is committed before."""
    committed = tmp_path / "committed"
    words = ["--steps=72", f"--gate={WRONG_FROM - 1}:{committed}", "--flip", str(rank), str(WRONG_FROM), key]
    options = (*SNAPSHOTS, "--store", str(tmp_path / "store"))
    with LocalRun(tmp_path / "run", "loop.py", words, options, hosts=3) as run:
        run.wait_for(lambda: run.events("checkpoint_committed"), "a sound checkpoint")
        committed.touch()
        assert run.wait() == 0, run.told()
    compared = run.events("replicas_compared")
    assert compared and all(event["differ"] == [[run.names[rank], key]] for event in compared), compared
    told = [detail for name in run.names for reason, detail in run.notes(name) if reason == "replica_divergence"]
    assert any(run.names[rank] in detail and key in detail for detail in told), told
    steps = {event["step"] for event in run.events("checkpoint_committed")}
    assert max(steps) < WRONG_FROM <= min(event["step"] for event in compared)
    assert json.loads(next((tmp_path / "store").glob("*/HEAD.json")).read_text())["step"] in steps


def sealed(run: LocalRun, host: str) -> set[int]:
    """The steps that this host's agent has seen sealed."""
    return {event["seal"]["step"] for event in run.events("snapshot_sealed", host)}


def has_seen(run: LocalRun, host: str, step: int) -> bool:
    """Whether this host's agent knows of that step; of what was sealed before it then, too, and gave a slab for it."""
    return any(event["completed"] >= step for event in run.events("steps_sampled", host))


def test_a_variable_that_would_not_be_saved_ends_the_script(tmp_path: Path) -> None:
    options = (*SNAPSHOTS, "--set", "restart.ceiling=0")
    with LocalRun(tmp_path, "loop.py", ["--steps=60", "--late"], options, hosts=1) as run:
        assert run.wait() != 0, run.told()
    assert "made after track(), so that it would not be saved: model/" in run.told()
    assert run.completed() <= 4, "it is told when the state is first saved"
