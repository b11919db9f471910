"""A simulated worker that is looked at: where it is, what it is about, and since when it has not moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.stalls import Stall

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost
    from keepstep.simulation.worker import SimWorker

_LOOK_S = 0.5


def probe(host: SimHost, action: a.SampleEntered | a.SamplePulse | a.CollectStacks) -> None:
    """Look at the host's worker; nobody answers for one that is gone."""
    worker = host.worker
    if worker is None or worker.spec.worker_id != action.worker_id:
        return
    match action:
        case a.SampleEntered():
            host.post(e.EnteredSampled(action.operation, action.worker_id, worker.entered), 0.002)
        case a.SamplePulse():
            silent_s = host.world.clock.now - worker.moved_at
            host.post(e.PulseSampled(action.operation, action.worker_id, worker.activity(), silent_s), 0.002)
        case a.CollectStacks():
            _collect(host, worker, action)


def _collect(host: SimHost, worker: SimWorker, action: a.CollectStacks) -> None:
    """Take a while to see what it is doing."""
    since = worker.moved_at

    def report() -> None:
        stall = None
        if worker.moved_at == since:
            stall = Stall(
                worker.activity(), since + host.skew_s, worker.entered, worker.completed,
                in_step=worker.entered > worker.completed, joined=worker.joined,
            )  # fmt: skip
        host.post(e.StacksCollected(action.operation, action.worker_id, stall))

    host.world.clock.after(_LOOK_S, report)
