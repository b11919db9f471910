"""A simulated worker that is looked at: where it is, what it is about, and since when it has not moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.preflight_records import Check, Link, Rate
from keepstep.core.stalls import Stall

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost
    from keepstep.simulation.worker import SimWorker

_LOOK_S = 0.5
_LINK, _CHECK_S = 1e9, 2.0


def probe(host: SimHost, action: a.SampleEntered | a.SamplePulse | a.CollectStacks | a.CheckHost) -> None:
    """Look at the host, or at its worker; nobody answers for one that is gone."""
    if isinstance(action, a.CheckHost):
        host.post(_checked(host, action), _CHECK_S)
        return
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


def _checked(host: SimHost, action: a.CheckHost) -> e.HostChecked:
    """All machines are equally fast and, as far as this tells, on time; who is away, or cut off, is not reached."""
    links = []
    for peer in action.peers:
        other = host.world.hosts[peer.host]
        if other.up and not other.cut and not host.cut:
            links.append(Link(peer.host, _LINK, _LINK))
        else:
            links.append(Link(peer.host, error="no answer"))
    rates = (Rate(Check.SPEED, 1e9), Rate(Check.MEMORY, 1e10))
    return e.HostChecked(action.operation, "simulated", rates, links=tuple(links), seconds=_CHECK_S)


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
