"""Standbys: processes of this host that have made a worker's large imports, so that a restart need not."""

from __future__ import annotations

from keepstep.core.actions import StartStandby
from keepstep.core.events import StandbyGone, StandbyReady, WorkerImported
from keepstep.core.facts import Standby, Standbys
from keepstep.core.launch import stands_by, worker_command
from keepstep.core.reasons import Reason
from keepstep.core.state import Turn
from keepstep.core.values import evolve

FALLS_MAX = 3
"""So many in a row were of no use: the script can not be run so."""
_SILENT_S = 30.0
"""A worker that reports no steps counts as training when it has run for so long."""


def keep(turn: Turn) -> None:
    """Start a standby where one is missing, once training runs: until then it would only be in the way.

    One after the other: two that import at once are both late. Failures come in swarms, so one more waits than the
    policy says after the first restart.
    """
    state, known = turn.state, turn.state.standbys
    wanted = state.policy.launch.standby
    if not wanted or len(known.waiting) >= wanted + known.restarted or known.falls >= FALLS_MAX or not known.modules:
        return
    if not all(each.is_ready for each in known.waiting):
        return
    if turn.interrupted or not state.workers or state.workers[0].stopping or not stands_by(state.job):
        return
    worker = state.workers[0]
    due_at = max(known.again_at, turn.now if worker.stepped else worker.started_at + _SILENT_S)
    if turn.now < due_at:
        turn.wake(due_at)
        return
    standby_id = f"{state.job.node_id}.standby.{known.starts}"
    _set(turn, waiting=(*known.waiting, Standby(standby_id)), starts=known.starts + 1)
    turn.do(StartStandby(standby_id, worker_command(state.job)), Reason.STANDBY_STARTS, standby_id)


def take(turn: Turn) -> str:
    """Have a standby for a worker that is about to start, a ready one first; empty where there is none."""
    known = turn.state.standbys
    if known.starts:
        _set(turn, restarted=True)
    if not known.waiting:
        return ""
    taken = next((each for each in known.waiting if each.is_ready), known.waiting[0])
    _set(turn, waiting=tuple(each for each in known.waiting if each is not taken))
    return taken.standby_id


def proven(turn: Turn) -> None:
    """A worker that was a standby has made a step: it was of use."""
    _set(turn, falls=0)


def on_worker_imported(turn: Turn, event: WorkerImported) -> None:
    """A script imports what a standby can import for the next one."""
    modules = turn.state.standbys.modules
    if event.module not in modules:
        _set(turn, modules=(*modules, event.module))


def on_standby_ready(turn: Turn, event: StandbyReady) -> None:
    """It waits from now on."""
    waiting = turn.state.standbys.waiting
    _set(turn, waiting=tuple(evolve(s, is_ready=True) if s.standby_id == event.standby_id else s for s in waiting))
    turn.because(Reason.STANDBY_READY, event.standby_id)


def on_standby_gone(turn: Turn, event: StandbyGone) -> None:
    """It is none any more, and was not asked to go; where it may be tried again later, that is no fault of its own."""
    known: Standbys = turn.state.standbys
    _set(
        turn,
        waiting=tuple(each for each in known.waiting if each.standby_id != event.standby_id),
        falls=known.falls + (not event.retry_s),
        again_at=turn.now + event.retry_s,
    )
    for worker in turn.state.workers:
        if worker.standby == event.standby_id:
            turn.set_worker(worker.worker_id, standby="")
    turn.because(Reason.STANDBY_GONE, f"{event.standby_id}: {event.detail}")


def _set(turn: Turn, **changes: object) -> None:
    turn.set(standbys=evolve(turn.state.standbys, **changes))
