"""A host is being taken away: hold workers at a step boundary, answer what they entered, never outstay the grace."""

from __future__ import annotations

from keepstep.core import files
from keepstep.core.actions import SampleEntered, SignalWorker
from keepstep.core.events import EnteredSampled, InterruptionNoticed
from keepstep.core.facts import Interruption
from keepstep.core.reasons import Reason
from keepstep.core.records import Phase, RequestRecord
from keepstep.core.state import Turn
from keepstep.core.world import durable_step, saved_text
from keepstep.errors import ExitCode

HOLD_SETTLES_S = 0.010
"""A worker that read `hold` as 0 has published the step it enters; after this long the agent is sure to see it."""

_SIGTERM = 15


def on_interruption_noticed(turn: Turn, event: InterruptionNoticed) -> None:
    """The platform takes this host away. A second notice can only bring the deadline forward."""
    known = turn.state.interruption
    if known is None or event.deadline < known.deadline:
        noticed_at = turn.now if known is None else known.noticed_at
        turn.set(interruption=Interruption(event.source, noticed_at, event.deadline))
        turn.because(Reason.INTERRUPTION_NOTICED, event.source)


def tell(turn: Turn) -> None:
    """Have the leader know; where there is no world that could be saved, go at once."""
    state, interruption = turn.state, turn.state.interruption
    if interruption is None:
        return
    generation = turn.generation
    feeds = generation is not None and generation.feeds(state.job.host) >= 0  # until all have stopped at one step
    if generation is None or not (turn.is_member or feeds):
        saved = saved_text(turn, state.last_generation.durable_step if state.last_generation else 0)
        turn.leave(ExitCode.INTERRUPTED, f"interrupted; {saved}", Reason.NOTHING_TO_SAVE)
        return
    if turn.now >= interruption.deadline:
        saved = saved_text(turn, durable_step(turn, generation))
        text = f"interrupted; the grace did not last for step {state.completed}; {saved}"
        turn.leave(ExitCode.INTERRUPTED, text, Reason.GRACE_SPENT)
        return
    turn.wake(interruption.deadline)
    if state.job.host not in state.cluster.requests and generation.phase is not Phase.ENDED:
        record = RequestRecord(state.job.host, interruption.source, interruption.noticed_at, interruption.deadline)
        turn.put(record, Reason.INTERRUPTION_NOTICED)


def hold(turn: Turn) -> None:
    """Hold this host's worker at its next step boundary and learn which step it has entered."""
    state, generation = turn.state, turn.generation
    if generation is None or generation.phase is not Phase.READY or not turn.is_member:
        return
    if not turn.interrupted and not generation.pause:
        return
    if state.held_at is None:
        turn.set(held_at=turn.now)
        turn.because(Reason.WORKERS_HELD)
    if state.entered >= 0 or state.held_at is None:
        return
    if not state.workers:
        if not files.settled(turn):
            return
        turn.set(entered=state.completed if state.done == generation.number else 0)
        return
    worker = state.workers[0]
    if not worker.joined:
        if turn.interrupted:
            _forward(turn, worker.worker_id, worker.signalled_at)
        else:
            turn.set(entered=worker.completed)  # it has entered none; should it still, it stops there
        return
    if turn.now < state.held_at + HOLD_SETTLES_S:
        turn.wake(state.held_at + HOLD_SETTLES_S)
        return
    turn.attempt(SampleEntered(f"entered:{worker.worker_id}", worker.worker_id), Reason.WORKERS_HELD)


def _forward(turn: Turn, worker_id: str, signalled_at: float | None) -> None:
    """A script that reports no steps gets the signal itself and a moment to act on it."""
    if signalled_at is None:
        turn.do(SignalWorker(worker_id, _SIGTERM), Reason.WORKERS_HELD, "signal forwarded to the script")
        turn.set_worker(worker_id, signalled_at=turn.now)
        signalled_at = turn.now
    until = signalled_at + turn.state.policy.interruption.script_grace
    if turn.now < until:
        turn.wake(until)
        return
    if files.settled(turn):
        turn.set(entered=0)


def on_entered_sampled(turn: Turn, event: EnteredSampled) -> None:
    """The worker's answer; it will not enter a later step before the drain step is agreed."""
    turn.landed(event.operation)
    if any(worker.worker_id == event.worker_id for worker in turn.state.workers):
        turn.set(entered=event.entered)
        turn.because(Reason.WORKERS_HELD, f"entered step {event.entered}")
    else:
        turn.because(Reason.STALE_WORKER, event.worker_id)
