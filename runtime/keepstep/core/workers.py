"""Workers of this host: stop what is older, start what the generation wants, absorb what they say and how they end."""

from __future__ import annotations

from keepstep.core import files, hang, health, servers, standby, stragglers
from keepstep.core.actions import (
    ClearSeal,
    DropSlabs,
    FetchSnapshot,
    Measure,
    Report,
    StartWorker,
    StopWorker,
    WriteOrders,
)
from keepstep.core.causes import FailureCause
from keepstep.core.checkpoints import SLABS, free_slab_number, make_room, orders_for, reload_seals
from keepstep.core.elastic import limits
from keepstep.core.events import (
    CheckpointCorrupt,
    FirstStepCompleted,
    SnapshotFetched,
    SnapshotUnwanted,
    StepsSampled,
    WorkerDivides,
    WorkerExited,
    WorkerHello,
    WorkerJoined,
    WorkerRestored,
    WorkerStarted,
)
from keepstep.core.facts import Recovery, Slab, Worker
from keepstep.core.launch import plan_worker, trains
from keepstep.core.membership import is_registered
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, Phase, Resume, Standing, StatusRecord
from keepstep.core.restarts import CLEAN_STOPS, classify_exit
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import group_of, peers_of, table_of
from keepstep.errors import ExitCode

STOPPING = "stop:"
"""What the failed stop of a process is known by, before its name."""
_STATUS_EVERY_S = 2.0


def stop_older(turn: Turn) -> None:
    """Stop every worker that does not belong to a ready generation of which this node is a member under a lease."""
    generation = turn.generation
    stands = generation is not None and generation.phase is Phase.READY and turn.has_lease
    servers.stop_older(turn, generation if stands and servers.serves(turn) else None)
    ready = stands and turn.is_member
    for worker in turn.state.workers:
        if worker.stopping or (ready and generation is not None and worker.generation == generation.number):
            continue
        turn.do(StopWorker(worker.worker_id), Reason.OLDER_WORKERS_STOP, f"generation {worker.generation}")
        turn.set_worker(worker.worker_id, stopping=True)


def start(turn: Turn) -> None:
    """Start this host's worker in a ready generation, once, with the state it resumes from at hand."""
    state, generation = turn.state, turn.generation
    if generation is None or generation.phase is not Phase.READY or not turn.is_member or not is_registered(turn):
        return
    if state.workers or state.spawned >= generation.number or turn.interrupted:
        return
    resume, rank = generation.resume, generation.rank_of(state.job.host)
    if not trains(state.job, rank):
        return
    if resume is not None and resume.manifest and state.trained_rank != rank:
        # What is local to a rank goes with the rank, and others may have this one's.
        _clear_seals(turn, resume.step - 1)
        turn.set(trained_rank=rank)
    slab = slab_of(state.slabs, resume)
    if resume is not None and slab is None:
        _bring(turn, generation, resume)
        return
    if not files.put_right(turn, generation):
        return
    worker_id = f"{state.job.node_id}.{state.spawns}"
    step = 0 if resume is None else resume.step
    taken = standby.take(turn)
    worker = Worker(
        worker_id, generation.number, rank, turn.now, entered=step, completed=step, standby=taken, sign_at=turn.now
    )
    _clear_seals(turn, step)
    turn.set(spawned=generation.number, spawns=state.spawns + 1, workers=(worker,), completed=step, trained_rank=rank)
    turn.set(restore=None if slab is None or slab.seal is None else (slab.slab, slab.seal.step))
    write_orders(turn)
    number = generation.number
    command, environment = plan_worker(state.job, table_of(generation, limits(turn)[1]), rank, state.policy)
    if generation.weights and all(generation.weight_of(m.host) > 0 for m in generation.members):
        weights = ",".join(str(generation.weight_of(member.host)) for member in generation.members)
        environment = (*environment, ("KEEPSTEP_WEIGHTS", weights))
    if generation.skipped:
        environment = (*environment, ("KEEPSTEP_SKIP", ",".join(map(str, generation.skipped))))
    turn.do(
        StartWorker(worker_id, number, rank, command, environment, taken),
        Reason.WORKER_STARTS,
        f"rank {rank} of generation {generation.number} at step {step}" + (", from a standby" if taken else ""),
    )


def _clear_seals(turn: Turn, step: int) -> None:
    """Let go of the snapshots of later steps."""
    for stale in turn.state.slabs:
        if stale.seal is not None and stale.seal.step > step:
            turn.set_slab(stale.slab, seal=None, digest="")
            turn.do(ClearSeal(stale.slab))


def slab_of(slabs: tuple[Slab, ...], resume: Resume | None) -> Slab | None:
    """The slab that holds exactly the state to resume from."""
    if resume is None:
        return None
    for slab in slabs:
        if slab.seal is not None and (slab.seal.step, slab.digest) == (resume.step, resume.digest):
            return slab
    return None


def _bring(turn: Turn, generation: GenerationRecord, resume: Resume) -> None:
    """Fetch the state to resume from, or report that this node can not have it."""
    state = turn.state
    if not resume.manifest or resume.manifest in state.store.corrupt:
        if state.failure is None:
            cause, host = FailureCause.STORE, state.job.host
            failure = Failure(cause, host, turn.now, step=resume.step, message="state not at hand")
            turn.set(failure=failure, failure_generation=generation.number)
            turn.because(Reason.CHECKPOINT_CORRUPT, resume.manifest)
        return
    rank = generation.rank_of(state.job.host)
    make_room(turn, SLABS - 1)  # each state that is brought has a slab of its own
    number = free_slab_number(turn.state)
    operation, peers = _fetch_of(generation, resume, rank), peers_of(generation, rank)
    group, place = group_of(generation, rank)
    fetch = FetchSnapshot(operation, resume.manifest, number, rank, len(generation.members), peers, group, place)
    if turn.attempt(fetch, Reason.RESTORE_WANTED, f"step {resume.step} from the store"):
        turn.set(next_slab=number + 1)


def _fetch_of(generation: GenerationRecord, resume: Resume, rank: int) -> str:
    """A fetch's name says what it brings: one that is under way is not begun again for the next generation."""
    return f"fetch:{resume.manifest}:{rank}:{len(generation.members)}"


def write_orders(turn: Turn) -> None:
    """Publish orders where they differ from the last ones published."""
    orders: WriteOrders | None = orders_for(turn)
    if orders is not None and orders != turn.state.orders:
        turn.set(orders=orders)
        turn.do(orders)


def report_status(turn: Turn) -> None:
    """Keep this host's status true; progress alone is refreshed every other second."""
    state, generation = turn.state, turn.generation
    if generation is None or generation.phase is Phase.FORMING or not turn.is_member or not turn.has_lease:
        return
    status = _status(turn, generation)
    seen = state.cluster.statuses.get(state.job.host)
    if seen is not None and seen.record == status:
        return
    # that a worker runs is what a generation that is ready says already
    known = _news_of(seen.record) if seen is not None else ()
    if _news_of(status) in (known, (status.node_id, generation.number, Standing.RUNNING, None, -1, None, 0, None)):
        due_at = max(state.status_at, state.ready_at) + _STATUS_EVERY_S
        if turn.now < due_at:
            turn.wake(due_at)
            return
    if turn.put(status, Reason.NOTHING_TO_DO, status.standing.value):
        turn.set(status_at=turn.now)


def _news_of(status: StatusRecord) -> tuple[object, ...]:
    """What others wait to hear; the rest is progress."""
    window = max((split.step for split in status.splits), default=0)
    told = status.entered, status.stall, window, status.fingerprint
    return status.node_id, status.generation, status.standing, status.failure, *told


def _status(turn: Turn, generation: GenerationRecord) -> StatusRecord:
    state = turn.state
    worker = state.workers[0] if state.workers else None
    failed = state.failure is not None and state.failure_generation == generation.number
    if generation.phase is Phase.ENDED and not turn.processes and files.settled(turn):
        standing = Standing.LEFT
    elif failed:
        standing = Standing.FAILED
    elif state.done == generation.number and files.settled(turn):
        standing = Standing.DONE
    elif not trains(state.job, generation.rank_of(state.job.host)):
        standing = Standing.SERVING
    else:
        standing = Standing.RUNNING
    ratio = worker.snapshot_s / worker.step_s if worker is not None and worker.step_s > 0 else 0.0
    return StatusRecord(
        state.job.host,
        state.job.node_id,
        generation.number,
        standing,
        state.failure if failed else None,
        state.completed if standing is Standing.DONE else state.entered,
        state.completed,
        max((s.seal.step for s in state.slabs if s.seal is not None), default=0),
        round(ratio, 4),
        worker.stall if worker is not None and standing is Standing.RUNNING else None,
        health.strains_of(state),
        worker.splits if worker is not None and standing is Standing.RUNNING else (),
        worker is not None and worker.divides,
        worker.fingerprint if worker is not None else None,
        worker is not None and worker.joined,
        state.saves,
    )


# --- what workers say ------------------------------------------------------------------------------------------------


def _known(turn: Turn, worker_id: str) -> Worker | None:
    for worker in turn.state.workers:
        if worker.worker_id == worker_id:
            return worker
    turn.because(Reason.STALE_WORKER, worker_id)
    return None


def on_worker_started(turn: Turn, event: WorkerStarted) -> None:
    """Its process exists."""
    _known(turn, event.worker_id)


def on_worker_hello(turn: Turn, event: WorkerHello) -> None:
    """Its bootstrap runs."""
    if _known(turn, event.worker_id) is not None:
        turn.set_worker(event.worker_id, greeted=True)


def on_worker_joined(turn: Turn, event: WorkerJoined) -> None:
    """It entered an instrumented `fit`, or called `join()`: steps will be reported."""
    if _known(turn, event.worker_id) is None:
        return
    turn.set_worker(event.worker_id, joined=True, loops=event.how == "loop")
    hang.sign(turn, event.worker_id)
    turn.set(files=evolve(turn.state.files, heard=True))
    recovery = turn.state.recovery
    if recovery is not None and not recovery.joined_at:
        turn.set(recovery=evolve(recovery, joined_at=turn.now))


def on_worker_divides(turn: Turn, event: WorkerDivides) -> None:
    """It takes its batches from `run.dataset`: their sizes can be changed."""
    if _known(turn, event.worker_id) is not None:
        turn.set_worker(event.worker_id, divides=True)


def on_worker_restored(turn: Turn, event: WorkerRestored) -> None:
    """Its variables hold the resume step."""
    if _known(turn, event.worker_id) is None:
        return
    turn.set_worker(event.worker_id, restored=True)
    hang.sign(turn, event.worker_id)
    turn.because(Reason.WORKER_RESTORED, f"step {event.step}")
    recovery = turn.state.recovery
    if recovery is not None and not recovery.restored_at:
        turn.set(recovery=evolve(recovery, restored_at=turn.now))


def on_first_step(turn: Turn, event: FirstStepCompleted) -> None:
    """Training goes on: if something was recovered from, it is over now."""
    worker = _known(turn, event.worker_id)
    if worker is None:
        return
    turn.set_worker(event.worker_id, stepped=True, completed=max(event.step, worker.completed))
    hang.sign(turn, event.worker_id)
    if worker.standby:
        standby.proven(turn)
    turn.because(Reason.FIRST_STEP, f"step {event.step}")
    recovery, generation = turn.state.recovery, turn.generation
    if recovery is None or generation is None or not recovery.ready_at:
        return
    for phase, seconds in recovery_phases(recovery, event.at):
        turn.do(Report(Measure.RECOVERY, seconds, phase))
    turn.set(recovery=None)


def recovery_phases(recovery: Recovery, first_step_at: float) -> list[tuple[str, float]]:
    """Seconds by phase; they add up to the last entry, `total`."""
    marks = (
        ("detect", recovery.learnt_at),
        ("stop", recovery.stopped_at),
        ("agree", recovery.ready_at),
        ("start", recovery.joined_at),
        ("restore", recovery.restored_at),
        ("first_step", first_step_at),
    )
    phases, last = [], recovery.fault_at
    for name, mark in marks:
        reached = max(last, mark)
        phases.append((name, reached - last))
        last = reached
    return [*phases, ("total", last - recovery.fault_at)]


def on_steps_sampled(turn: Turn, event: StepsSampled) -> None:
    """A sample of the heartbeat ring."""
    worker = _known(turn, event.worker_id)
    if worker is None:
        return
    turn.set_worker(
        event.worker_id,
        entered=event.entered,
        completed=event.completed,
        step_s=event.step_s,
        snapshot_s=event.snapshot_s,
    )
    # A worker's first step is traced and compiled: nothing to expect of the others.
    hang.sign(turn, event.worker_id, event.step_s if event.completed > worker.completed else 0.0)
    turn.set(completed=max(event.completed, turn.state.completed))
    stragglers.add(turn, event.worker_id, event.splits)


def on_worker_exited(turn: Turn, event: WorkerExited) -> None:
    """A process is gone: by our order, done, or failed."""
    if servers.on_exited(turn, event):
        return
    worker = _known(turn, event.worker_id)
    if worker is None:
        return
    state = turn.state
    turn.set(
        workers=tuple(w for w in state.workers if w.worker_id != event.worker_id),
        completed=max(state.completed, event.completed),
        restore=None,
    )
    reload_seals(turn, event.seals)
    if worker.stopping:
        turn.because(Reason.WORKER_STOPPED, worker.worker_id)
        hang.on_frozen(turn, worker, event)
    elif turn.interrupted and (worker.signalled_at is not None or event.exit_code in CLEAN_STOPS):
        turn.because(Reason.WORKER_STOPPED, "ended by the forwarded signal")
    elif event.exit_code == 0:
        turn.set(done=worker.generation)
        turn.because(Reason.WORKER_DONE, f"rank {worker.rank}")
    else:
        in_loop = worker.loops and event.entered > event.completed
        failure = classify_exit(state.job.host, worker.rank, event)
        step = max(failure.step, worker.entered)  # one that dies before it says so has begun where it was to go on from
        failure = evolve(failure, step=step, files=state.files.number, in_loop=in_loop)
        turn.set(failure=failure, failure_generation=worker.generation)
        if state.recovery is None:
            turn.set(recovery=Recovery(fault_at=failure.at, learnt_at=turn.now))
        turn.because(Reason.WORKER_FAILED, f"rank {worker.rank}: {failure.cause.value} {failure.error_type}".strip())


def on_stuck(turn: Turn, worker_id: str, error: str) -> None:
    """A process was killed and does not go: nothing can be started beside it, however long anybody waits."""
    if worker_id in turn.processes:
        hint = "a driver or a file system does not let it go; the host needs a restart"
        turn.leave(ExitCode.HARDWARE, f"{turn.state.job.host}: {error}", Reason.WORKER_STUCK, hint)


def on_snapshot_fetched(turn: Turn, event: SnapshotFetched) -> None:
    """A committed checkpoint lies in a slab, verified; one that no generation wants any more is let go of."""
    turn.landed(event.operation)
    seal, generation = event.seal, turn.generation
    resume = None if generation is None else generation.resume
    rank = -1 if generation is None else generation.rank_of(turn.state.job.host)
    if generation is None or resume is None or event.operation != _fetch_of(generation, resume, rank):
        turn.do(DropSlabs((seal.slab,)), Reason.STALE_GENERATION, event.operation)
        return
    turn.set(slabs=(*turn.state.slabs, Slab(seal.slab, seal.size_bytes, seal, event.digest)))
    turn.because(Reason.SNAPSHOT_VERIFIED, f"step {seal.step}")


def on_snapshot_unwanted(turn: Turn, event: SnapshotUnwanted) -> None:
    """A fetch has ended that came too late."""
    turn.landed(event.operation)
    turn.because(Reason.STALE_GENERATION, event.operation)


def on_checkpoint_corrupt(turn: Turn, event: CheckpointCorrupt) -> None:
    """A checkpoint is not what its manifest says: never again."""
    turn.landed(event.operation)
    turn.set_store(corrupt=(*turn.state.store.corrupt, event.manifest))
    turn.because(Reason.CHECKPOINT_CORRUPT, f"{event.manifest}: {event.detail}")
