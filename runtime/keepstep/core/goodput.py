"""Where a host's time goes: every second of it in exactly one bucket, so that the buckets add up to wall time.

Not a fact that anything is decided by, so no part of the state: an account kept beside it, turn by turn, by the agent
as by a replay. The time up to a turn belongs to what the host was about since the turn before; what turns out later
(that steps were done in vain, that a fault had happened before it was noticed) is moved from one bucket to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from itertools import pairwise

from keepstep.core import events as e
from keepstep.core.facts import Worker
from keepstep.core.records import GenerationRecord, Phase
from keepstep.core.stalls import Activity
from keepstep.core.state import State
from keepstep.core.values import evolve, frozen

SILENT_S = 30.0
"""A worker that reports no steps counts as training when it has run for so long."""
_MARKS_MAX = 128


class Bucket(StrEnum):
    """What a second was spent on."""

    START = "start"
    """Until the first worker runs: hosts that are waited for, the first agreement; a worker's own start."""
    IMPORT = "import"
    """What a script does before it comes to its training."""
    TRACING = "tracing"
    """From the restored state, or from nothing, to the first completed step."""
    PRODUCTIVE = "productive"
    EVALUATION = "evaluation"
    LOST_STEPS = "lost_steps"
    """Steps that had to be done again."""
    DATA_AGAIN = "data_again"
    """Data that were read only to come to where the training was."""
    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    WAITING = "waiting"
    """For the gradients of other ranks, where that is measured."""
    DETECT = "detect"
    STOP = "stop"
    AGREE = "agree"
    RESTORE = "restore"
    IDLE = "idle"
    """No part of the world, or waiting for others at its end."""
    BETWEEN = "between_attempts"


@frozen
class Account:
    """One host's account.

    Attributes:
        at: up to when it is kept, unix seconds.
        bucket: what the host is about since then.
        seconds: by bucket; those that are missing are empty.
        marks: steps, and how many seconds were productive when each was known to be completed; oldest first.
        worker_id: the newest worker that it knows of.
        fault_at: of the newest recovery that it knows of.
    """

    at: float
    bucket: Bucket = Bucket.START
    seconds: Mapping[Bucket, float] = field(default_factory=dict)
    marks: tuple[tuple[int, float], ...] = ()
    worker_id: str = ""
    fault_at: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def after(account: Account, state: State, event: e.Event, now: float) -> Account:
    """The account after a turn that `event` brought to `state` at `now`, unix seconds."""
    seconds = dict(until(account, now, account.bucket).seconds)
    marks, worker_id, fault_at = account.marks, account.worker_id, account.fault_at
    worker = state.workers[0] if state.workers else None
    _move_what_is_measured(seconds, state, event, now)
    if state.recovery is not None and state.recovery.fault_at != fault_at:
        fault_at = state.recovery.fault_at
        unnoticed_s = min(max(0.0, now - fault_at), max(0.0, now - account.at) + _since(account, fault_at))
        _move(seconds, Bucket.PRODUCTIVE, Bucket.DETECT, unnoticed_s)
    if worker is not None and worker.worker_id != worker_id:
        worker_id = worker.worker_id
        if marks:
            lost_s = seconds.get(Bucket.PRODUCTIVE, 0.0) - productive_at(marks, worker.completed)
            _move(seconds, Bucket.PRODUCTIVE, Bucket.LOST_STEPS, lost_s)
        marks = tuple(mark for mark in marks if mark[0] < worker.completed)
        marks = (*marks, (worker.completed, seconds.get(Bucket.PRODUCTIVE, 0.0)))
    if isinstance(event, e.StepsSampled):
        marks = (*marks, (event.completed, seconds.get(Bucket.PRODUCTIVE, 0.0)))
        marks = marks[::2] if len(marks) > _MARKS_MAX else marks
    bucket = bucket_of(state, now)
    return Account(max(now, account.at), bucket, seconds, marks, worker_id, fault_at)


def until(account: Account, now: float, bucket: Bucket) -> Account:
    """The account up to `now`, from which on the host is about something else."""
    seconds = dict(account.seconds)
    seconds[account.bucket] = seconds.get(account.bucket, 0.0) + max(0.0, now - account.at)
    return evolve(account, at=max(now, account.at), bucket=bucket, seconds=seconds)


def bucket_of(state: State, now: float) -> Bucket:
    """What a host is about in this state."""
    seen = state.cluster.generation
    generation = None if seen is None else seen.record
    worker = state.workers[0] if state.workers else None
    if worker is None and (state.exit_code is not None or state.leaving_at is not None or state.done):
        return Bucket.IDLE
    if worker is not None:
        if worker.stopping or generation is None or generation.number != worker.generation:
            return Bucket.STOP
        if state.orders is not None and state.orders.hold:
            return Bucket.DRAIN
        return _of_worker(state, worker, now)
    if any(server.stopping for server in state.servers):
        return Bucket.STOP
    if generation is not None and generation.phase is Phase.READY and _serves(state, generation):
        return Bucket.PRODUCTIVE
    if generation is not None and generation.phase is Phase.READY:
        return Bucket.RESTORE if generation.rank_of(state.job.host) >= 0 else Bucket.IDLE
    return Bucket.AGREE if state.spawns or state.serves else Bucket.START


def _serves(state: State, generation: GenerationRecord) -> bool:
    return any(server.generation == generation.number and not server.ended for server in state.servers)


def _of_worker(state: State, worker: Worker, now: float) -> Bucket:
    if worker.stepped:
        return Bucket.EVALUATION if worker.activity is Activity.EVALUATION else Bucket.PRODUCTIVE
    if worker.joined:
        restores = state.restore is not None and not worker.restored
        return Bucket.RESTORE if restores else Bucket.TRACING
    if not worker.greeted:
        return Bucket.START
    return Bucket.IMPORT if now < worker.started_at + SILENT_S else Bucket.PRODUCTIVE


def productive_at(marks: tuple[tuple[int, float], ...], step: int) -> float:
    """Productive seconds when a step was completed, by the marks around it; the nearest one's beyond them."""
    for (low, low_s), (high, high_s) in pairwise(marks):
        if low <= step < high:
            return low_s + (high_s - low_s) * (step - low) / (high - low)
    return marks[-1][1] if step >= marks[-1][0] else marks[0][1]


def resumed(account: Account, at: float, gap: Bucket) -> Account:
    """An account that is taken up again after nobody has kept it for a while.

    Args:
        account: as it was left.
        at: unix seconds, now.
        gap: what the time in between counts as: DETECT where an agent was dead, BETWEEN where the job was.
    """
    return until(evolve(account, bucket=gap), at, Bucket.START)


def _move_what_is_measured(seconds: dict[Bucket, float], state: State, event: e.Event, now: float) -> None:
    if isinstance(event, e.WorkerJoined):
        for worker in state.workers:  # so it was not training all the while
            if worker.worker_id == event.worker_id and not worker.stepped:
                _move(seconds, Bucket.PRODUCTIVE, Bucket.IMPORT, now - worker.started_at - SILENT_S)
    elif isinstance(event, e.SnapshotSealed):
        _move(seconds, Bucket.PRODUCTIVE, Bucket.SNAPSHOT, event.seconds)
    elif isinstance(event, e.StepsSampled):
        _move(seconds, Bucket.PRODUCTIVE, Bucket.WAITING, event.waited_s)
    elif isinstance(event, e.WorkerRestored):
        _move(seconds, Bucket.RESTORE, Bucket.DATA_AGAIN, event.data_s)


def _since(account: Account, moment: float) -> float:
    """Productive seconds between a moment and the account's end, if it was productive by then."""
    return max(0.0, account.at - moment) if account.bucket is Bucket.PRODUCTIVE else 0.0


def _move(seconds: dict[Bucket, float], source: Bucket, target: Bucket, amount_s: float) -> None:
    """Move seconds, no more than there are."""
    amount_s = min(max(0.0, amount_s), seconds.get(source, 0.0))
    if amount_s:
        seconds[source] -= amount_s
        seconds[target] = seconds.get(target, 0.0) + amount_s
