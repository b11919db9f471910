"""All hosts are told to stop while one of them can not answer any more: what all had sealed is saved nevertheless."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.many_hosts import ManyHosts
from tests.support.namespaces import missing

LOCKSTEP = Path(__file__).parents[1] / "support" / "lockstep_job.py"
SETTINGS = (
    "checkpoint.snapshot_every=10 steps", "checkpoint.every=100000 steps", "coordination.lease=3s",
    "interruption.grace=60s",
)  # fmt: skip
"""No commit is due before the interruption."""

pytestmark = [
    pytest.mark.e2e, pytest.mark.hosts, pytest.mark.timeout(400), pytest.mark.skipif(bool(missing()), reason=missing()),
]  # fmt: skip


def freeze_worker(run: ManyHosts, host: str) -> None:
    run.freeze(run.worker(host))


def freeze_agent(run: ManyHosts, host: str) -> None:
    run.freeze(run.agent(host))


SLABS = 3
HARM: dict[str, Callable[[ManyHosts, str], None]] = {
    "worker frozen": freeze_worker,
    "agent frozen": freeze_agent,
    "host dead": lambda run, host: run.kill_host(host),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", HARM)
def test_a_peer_that_hangs_or_is_dead_costs_no_sealed_snapshot(how: str, tmp_path: Path) -> None:
    with ManyHosts(tmp_path / "run", LOCKSTEP, [str(tmp_path), "100000", "0.02"], settings=SETTINGS) as run:
        newest = run.wait_for(lambda: sealed_by_all(run), "snapshots")
        peer = next(host for host in reversed(run.names) if host != run.leader())
        rest = [host for host in run.names if host != peer]
        committed = run.durable()
        HARM[how](run, peer)
        for host in rest if how == "host dead" else run.names:
            os.kill(run.life(host).process.pid, signal.SIGTERM)
        assert set(run.wait(*rest).values()) == {143}, run.told()
        saved = run.head()["step"]
        assert saved >= newest > committed, run.told()
        for host in rest:
            failure = run.failure(host)
            assert failure is not None and f"saved up to step {saved}" in failure
            assert "the grace did not last" not in failure


def sealed_by_all(run: ManyHosts) -> int:
    """The newest step of which all hosts' agents have seen one of the newest seals; 0 while they are few."""
    newest = [
        {turn.event["seal"]["step"] for turn in run.events("snapshot_sealed", host)[-SLABS:]} for host in run.names
    ]
    return max((step for step in set.intersection(*newest) if step >= 100), default=0)
