"""Hangs: a worker that shows no sign of its script getting on, and whose fault it is.

In a synchronous step everybody waits for the slowest, so silence alone names nobody: one rank may rightly be busy for
long (its evaluation, its checkpoint) while the others sit in the step that it has yet to enter. So each node judges its
own worker by what that is doing, and says so; the world hangs once every worker in it is past its own deadline. A
script that never reports a step is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.core.actions import CollectStacks, SamplePulse
from keepstep.core.causes import FailureCause
from keepstep.core.events import PulseSampled, StacksCollected, WorkerEvaluates, WorkerExited
from keepstep.core.facts import Worker
from keepstep.core.policy import Hang
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, Phase, Standing, StatusRecord
from keepstep.core.stalls import Activity, Stall
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import statuses_of

_LOOK_AGAIN_S = 2.0
"""How often a worker that stands still is looked at, in case it goes on."""
_FORGETS = 0.98
"""By so much the slowest step counts less with each sample that has none."""


def watch(turn: Turn) -> None:
    """Look at a worker that is past its deadline; where it does stand still, have its stacks collected."""
    worker = turn.state.workers[0] if turn.state.workers else None
    if worker is None or not _is_judged(turn, worker):
        return
    wait_s = deadline_s(turn.state.policy.hang, worker.activity, worker.slow_s)
    if wait_s is None:
        return
    due_at = worker.sign_at + wait_s
    if turn.now < due_at:
        turn.wake(due_at)
    elif worker.looked_at < due_at or worker.stall is not None:
        turn.attempt(SamplePulse(f"pulse:{worker.worker_id}", worker.worker_id), Reason.PAST_DEADLINE)
    else:
        pause_s = turn.state.policy.coordination.lease  # half of what TensorFlow's heartbeats bear
        operation = f"stacks:{worker.worker_id}"
        collect = CollectStacks(operation, worker.worker_id, worker.generation, worker.rank, pause_s)
        detail = f"{worker.activity.value} for more than {wait_s:.0f} s"
        turn.attempt(collect, Reason.STACKS_WANTED, detail)


def deadline_s(policy: Hang, activity: Activity, slow_s: float) -> float | None:
    """Seconds without a sign after which a worker counts as standing still; None: it is not judged.

    Args:
        policy: its floors hold where steps are quick, or none was done yet.
        activity: what the worker is about.
        slow_s: what the slowest of its recent steps took.
    """
    if policy.deadline == "off" or activity is Activity.FINISHED:
        return None
    floors = {
        Activity.START: policy.first_step,
        Activity.FIRST_STEP: policy.first_step,
        Activity.EPOCH: policy.data,
        Activity.PAUSE: policy.pause,
        Activity.EVALUATION: policy.pause,
    }
    floor_s = floors.get(activity, policy.floor)
    return max(floor_s, policy.factor * slow_s) if policy.deadline == "auto" else max(policy.deadline, floor_s)


def hangs(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether all of the world stands still, one at least in training that reports its steps."""
    tally = turn.state.cluster.tally
    if not tally.stalled_in_training:
        return False
    silent = _silent(generation, statuses_of(turn, generation))
    return tally.stalled + tally.done + len(silent) >= len(generation.members)


def _silent(generation: GenerationRecord, statuses: dict[str, StatusRecord]) -> list[str]:
    """Members whose workers have not come to their training while all others are past the time for a first step.

    A script that never reports steps is not judged; but this one's other ranks do.
    """
    stalls = [status.stall for status in statuses.values() if status.stall is not None]
    if any(stall.activity not in (Activity.START, Activity.FIRST_STEP) for stall in stalls):
        return []
    known = {
        host
        for host, status in statuses.items()
        if status.joined or status.stall is not None or status.standing is not Standing.RUNNING
    }
    return [member.host for member in generation.members if member.host not in known]


def failures_of(turn: Turn, generation: GenerationRecord, statuses: dict[str, StatusRecord]) -> list[Failure]:
    """What a world that hangs failed of: one failure for each rank that holds the others up."""
    stalls = {host: status.stall for host, status in statuses.items() if status.stall is not None}
    if silent := _silent(generation, statuses):
        since = min((stall.since for stall in stalls.values()), default=turn.now)
        text = "its script has not come to its training, and all others wait"
        ranks = [(host, generation.rank_of(host)) for host in silent]
        return [Failure(FailureCause.HANG, host, since, rank, 0, message=text) for host, rank in ranks]
    named = culprits(list(stalls.values()))
    found = []
    for host, stall in stalls.items():
        if stall in named:
            rank = stall.rank if stall.rank >= 0 else generation.rank_of(host)
            whole = "no rank is behind the others: " if 1 < len(named) == len(stalls) else ""
            failure = Failure(FailureCause.HANG, host, stall.since, rank, stall.entered, message=whole + tell(stall))
            found.append(failure)
    return found


def tell(stall: Stall) -> str:
    """A line for people: where the worker stands, and in which calls."""
    states = {"T": ", stopped by a signal", "t": ", stopped by a debugger", "D": ", in uninterruptible sleep"}
    ready = {True: ", gradients ready", False: ", gradients not ready", None: ""}[stall.ready]
    calls = f", in {'; '.join(stall.calls)}" if stall.calls else ""
    return f"{stall.activity.value}, step {stall.entered} entered{ready}{states.get(stall.process, '')}{calls}"


def culprits(stalls: Sequence[Stall]) -> list[Stall]:
    """Those that the others wait for: the first difference that tells, and all of them where none does."""
    if not stalls:
        return []
    behind = min((stall.completed, stall.entered) for stall in stalls)
    signs: tuple[Callable[[Stall], bool], ...] = (
        lambda stall: stall.process in ("T", "t", "D"),
        lambda stall: stall.activity is Activity.START,
        lambda stall: (stall.completed, stall.entered) == behind,
        lambda stall: stall.ready is False and any(other.ready for other in stalls),
        lambda stall: not stall.in_step,
        lambda stall: not _common(stall, stalls),
        lambda stall: stall.spins,
    )
    for sign in signs:
        found = [stall for stall in stalls if sign(stall)]
        if 0 < len(found) < len(stalls):
            return found
    return list(stalls)


def _common(stall: Stall, stalls: Sequence[Stall]) -> bool:
    """Whether all the calls of the script that it is in are those of others, too."""
    return all(any(call in other.calls for other in stalls if other is not stall) for call in stall.calls)


def _is_judged(turn: Turn, worker: Worker) -> bool:
    """Whether it ought to get on: it is not being stopped or held, and neither it nor its world is over."""
    state, generation = turn.state, turn.generation
    if worker.stopping or turn.interrupted or (state.orders is not None and state.orders.hold):
        return False
    if generation is None or generation.phase is not Phase.READY or generation.number != worker.generation:
        return False
    # one that has not joined may be of a script that never does
    return not generation.pause and (worker.joined or state.files.heard)


# --- what is heard ---------------------------------------------------------------------------------------------------


def sign(turn: Turn, worker_id: str, step_s: float = 0.0) -> None:
    """The worker gets on: it has just begun or ended something."""
    for worker in turn.state.workers:
        if worker.worker_id == worker_id:
            if worker.stall is not None:
                turn.because(Reason.MOVES_AGAIN, f"rank {worker.rank}")
            activity = Activity.STEP if worker.stepped else Activity.FIRST_STEP if worker.joined else Activity.START
            slow_s = max(step_s, worker.slow_s * _FORGETS) if step_s else worker.slow_s
            turn.set_worker(worker_id, sign_at=turn.now, activity=activity, slow_s=slow_s, stall=None)


def on_pulse_sampled(turn: Turn, event: PulseSampled) -> None:
    """The worker was looked at: what it is about, and for how long it was seen to give no sign."""
    turn.landed(event.operation, turn.now + _LOOK_AGAIN_S)
    for worker in turn.state.workers:
        if worker.worker_id != event.worker_id:
            continue
        sign_at = turn.now - event.silent_s
        if worker.stall is not None and sign_at > worker.looked_at:
            turn.set_worker(worker.worker_id, stall=None)
            turn.because(Reason.MOVES_AGAIN, f"rank {worker.rank}")
        turn.set_worker(worker.worker_id, activity=event.activity, sign_at=sign_at, looked_at=turn.now)


def on_frozen(turn: Turn, worker: Worker, event: WorkerExited) -> None:
    """A worker that was ordered to stop had been stopped by a signal: what the others failed of is that.

    TensorFlow ends the ranks that wait for it by its own heartbeats, long before anybody looks.
    """
    generation = turn.generation
    if not event.frozen or turn.state.failure is not None or generation is None or not generation.failures:
        return
    entered = max(event.entered, event.completed)
    stall = Stall(worker.activity, turn.now, entered, event.completed, "T")
    failure = Failure(FailureCause.HANG, turn.state.job.host, turn.now, worker.rank, entered, message=tell(stall))
    turn.set(failure=failure, failure_generation=worker.generation)
    turn.because(Reason.STALLED, tell(stall))


def on_worker_evaluates(turn: Turn, event: WorkerEvaluates) -> None:
    """Its next sign may take longer than that of a step."""
    activity = Activity.EVALUATION if event.begun else Activity.STEP
    sign(turn, event.worker_id)
    turn.set_worker(event.worker_id, activity=activity)


def on_stacks_collected(turn: Turn, event: StacksCollected) -> None:
    """What the worker was found doing; a `stall` of None: it had gone on by then."""
    turn.landed(event.operation)
    for worker in turn.state.workers:
        if worker.worker_id != event.worker_id:
            continue
        if event.stall is None:
            turn.set_worker(worker.worker_id, sign_at=turn.now, looked_at=turn.now)
            turn.because(Reason.MOVES_AGAIN, f"rank {worker.rank}")
        else:
            ranks = (event.stall, *event.others)
            stall = evolve(culprits(ranks)[0], joined=any(each.joined for each in ranks))
            turn.set_worker(event.worker_id, stall=stall)
            turn.because(Reason.STALLED, tell(stall))
