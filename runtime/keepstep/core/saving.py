"""What the leader does while a generation trains: agree on what to save, commit it, drain when interrupted, finish."""

from __future__ import annotations

from keepstep.core import elastic, pace, pausing, preflight, repeats, stragglers
from keepstep.core.actions import CommitCheckpoint, CompareReplicas, Measure, Report, SweepStore
from keepstep.core.events import CheckpointCommitted, CommitRefused, Head, ReplicasCompared
from keepstep.core.reasons import Reason
from keepstep.core.records import AckRecord, GenerationRecord, Resume, UploadRecord
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import common_held
from keepstep.core.world import (
    durable_step,
    end,
    gave_up_saving,
    has_snapshots,
    is_done,
    saved_text,
    statuses_of,
    store_answers,
)
from keepstep.errors import ExitCode

NAMED_MAX = 8
_DRAIN_SHARE = 0.4


def steer(turn: Turn, generation: GenerationRecord) -> None:
    """All members train: finish, drain, or keep the cadence of checkpoints."""
    commit(turn, generation)
    durable = durable_step(turn, generation)
    if durable != generation.durable_step:
        saved = generation.save_step <= durable
        step = 0 if saved and not generation.drain_step else generation.save_step
        record = evolve(
            generation, durable_step=durable, save_step=step, save_s=round(pace.save_s(turn, generation), 3)
        )
        turn.put(record, Reason.CHECKPOINT_COMMITTED, f"step {durable}")
        return
    if is_done(turn, generation):
        _finish(turn, generation)
    elif turn.interrupted:
        _drain(turn, generation)
    elif generation.pause:
        pausing.proceed(turn, generation)
    elif pausing.plan(turn, generation) or not has_snapshots(turn, generation):
        return
    elif not (stragglers.respond(turn, generation) or repeats.steer(turn, generation)):
        _keep_cadence(turn, generation)


def _finish(turn: Turn, generation: GenerationRecord) -> None:
    """Every worker exited with 0: commit the last snapshot, then end the job."""
    statuses = statuses_of(turn, generation)
    last = min(status.sealed for status in statuses.values())
    wanted = turn.state.job.has_store and last > generation.durable_step
    if wanted and not gave_up_saving(turn) and not _is_withheld(turn, generation, last):
        _save(turn, generation, last)
        return
    verdict = f"done; step {last} could not be committed, {generation.durable_step} is" if wanted else "done"
    end(turn, generation, ExitCode.DONE, verdict, Reason.JOB_DONE)


def _save(turn: Turn, generation: GenerationRecord, step: int) -> bool:
    """Ask every member to upload its share of this step; True where that was asked for."""
    if generation.save_step == step:
        return False
    return turn.put(evolve(generation, save_step=step), Reason.CHECKPOINT_DUE, f"step {step}")


def _keep_cadence(turn: Turn, generation: GenerationRecord) -> None:
    """Snapshots as often as they are worth it; checkpoints as often as the policy wants."""
    every = pace.snapshot_every(turn, generation)
    if every != generation.snapshot_every:
        turn.put(evolve(generation, snapshot_every=every), Reason.CADENCE_CHANGED, f"every {every} steps")
        return
    state = turn.state
    if not state.job.has_store or not generation.snapshot_every or state.store.refused:
        return
    if generation.save_step and not _missed(turn, generation):
        return
    completed, step_s = _progress(turn, generation)
    if completed < 0:
        return
    due_at, due_step = _due(turn, generation)
    if turn.now < due_at or completed < due_step:
        if turn.now < due_at:
            turn.wake(due_at)
        return
    if elastic.may_grow(turn, generation) and preflight.lets_start(turn):
        pausing.ask(turn, generation, Reason.HOSTS_RETURNED)  # its agreed step is the checkpoint that is due
        return
    every = generation.snapshot_every
    ahead = 1 + (int(0.5 / step_s) if step_s > 0 else every)
    step = ((completed + ahead) // every + 1) * every
    repeat = repeats.beside(turn, generation, step)
    if _save(turn, evolve(generation, repeat=repeat), step) and repeat.step:
        turn.because(Reason.REPEAT_WANTED, f"step {repeat.step}")


def _missed(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether a member could not upload its share of the step being saved."""
    uploads = _uploads(turn, generation, generation.save_step) if turn.state.cluster.tally.missed else []
    return any(not share.objects for share in uploads)


def _progress(turn: Turn, generation: GenerationRecord) -> tuple[int, float]:
    """The newest completed step, -1 before the first, and the seconds of a step, 0 where unknown."""
    if turn.is_member:
        worker = turn.state.workers[0] if turn.state.workers else None
        return (worker.completed, worker.step_s) if worker is not None and worker.stepped else (-1, 0.0)
    started = generation.resume.step if generation.resume is not None else 0
    completed = max((status.step for status in statuses_of(turn, generation).values()), default=0)
    return (completed, 0.0) if completed > started else (-1, 0.0)


def _due(turn: Turn, generation: GenerationRecord) -> tuple[float, int]:
    """When, and from which completed step on, the next checkpoint is due."""
    state = turn.state
    since = max(state.store.last_commit_at, state.ready_at)
    every = state.policy.checkpoint_every
    if every.steps is not None:
        return since, generation.durable_step + every.steps - generation.snapshot_every
    return since + (pace.interval_s(turn, generation) or 0.0), 0


def _uploads(turn: Turn, generation: GenerationRecord, step: int) -> list[UploadRecord]:
    """The members' shares of a step that have arrived, in rank order."""
    uploads = turn.state.cluster.uploads
    keys = [f"uploads/{generation.number}/{step}/{m.host}" for m in generation.members]
    return [uploads[key].record for key in keys if key in uploads]


def _diverged(shares: list[UploadRecord]) -> bool:
    """Whether hosts hold different bytes for what must be equal everywhere: no such step is ever committed."""
    return len({share.digest for share in shares if share.objects}) > 1


def _is_withheld(turn: Turn, generation: GenerationRecord, step: int) -> bool:
    """Whether a step in which hosts differ is given up: only once all shares are there is it told which tensors."""
    shares = _uploads(turn, generation, step)
    return _diverged(shares) and (generation.save_step != step or not all(share.objects for share in shares))


def commit(turn: Turn, generation: GenerationRecord) -> None:
    """Once every share of the step being saved is in the store, and all digests agree, commit it."""
    if not generation.save_step or generation.save_step <= durable_step(turn, generation):
        return
    operation = f"commit:{generation.number}:{generation.save_step}"
    if len(turn.state.cluster.uploads) < len(generation.members) or turn.in_flight(operation):
        return
    shares = _uploads(turn, generation, generation.save_step)
    if len(shares) < len(generation.members) or any(not share.objects for share in shares):
        return
    if _diverged(shares):
        _withhold(turn, generation, shares)
        return
    turn.attempt(
        CommitCheckpoint(
            operation,
            generation.number,
            generation.save_step,
            generation.run,
            shares[0].digest,
            len(generation.members),
            tuple(item for share in shares for item in share.objects),
        ),
        Reason.COMMIT_STARTS,
        f"step {generation.save_step}",
    )


def _withhold(turn: Turn, generation: GenerationRecord, shares: list[UploadRecord]) -> None:
    """Hosts differ where they must not: nobody knows which of them is right."""
    step, detail = shares[0].step, ", ".join(f"{share.host} {share.digest}" for share in shares)
    if turn.state.policy.checkpoint.divergence == "stop":
        text = f"replicas differ at step {step}: {detail}; {saved_text(turn, durable_step(turn, generation))}"
        told = end(turn, generation, ExitCode.HARDWARE, text, Reason.REPLICA_DIVERGENCE)
    else:
        told = turn.put(evolve(generation, save_step=0), Reason.REPLICA_DIVERGENCE, detail)
    if told:
        found = tuple((share.host, share.digest) for share in shares)
        turn.do(CompareReplicas(generation.number, step, generation.run, found))
        turn.set_store(last_commit_at=turn.now)


def on_replicas_compared(turn: Turn, event: ReplicasCompared) -> None:
    """Silent corruption has a name."""
    names = ", ".join(f"{host} {tensor}" for host, tensor in event.differ[:NAMED_MAX])
    more = f" and {len(event.differ) - NAMED_MAX} more" if event.differ[NAMED_MAX:] else ""
    turn.because(Reason.REPLICA_DIVERGENCE, f"step {event.step}: {names}{more}")


def on_checkpoint_committed(turn: Turn, event: CheckpointCommitted) -> None:
    """HEAD names the step."""
    turn.landed(event.operation)
    store_answers(turn)
    generation = turn.generation
    shares = _uploads(turn, generation, event.step) if generation is not None else []
    digest = next((share.digest for share in shares), "")
    turn.set_store(
        head=Head(event.generation, event.step, digest, event.manifest),
        head_known=True,
        failing_since=None,
        last_commit_at=turn.now,
    )
    pace.saved(turn, max((share.seconds for share in shares), default=0.0) + event.seconds)
    turn.do(Report(Measure.COMMIT_S, event.seconds), Reason.CHECKPOINT_COMMITTED, f"step {event.step}")
    turn.do(SweepStore(event.generation, _being_restored(generation, event.step)))


def _being_restored(generation: GenerationRecord | None, step: int) -> tuple[str, ...]:
    """The checkpoint that hosts may be reading yet when this step is committed: all have sealed what is later."""
    resume = None if generation is None else generation.resume
    return (resume.manifest,) if resume is not None and resume.manifest and step <= resume.step else ()


def on_commit_refused(turn: Turn, event: CommitRefused) -> None:
    """A newer generation has claimed HEAD: what this one has to say is old news."""
    turn.landed(event.operation, turn.now + 1.0)
    turn.set_store(fenced=max(event.generation, turn.state.store.fenced))
    if turn.generation is None or event.generation >= turn.generation.number:
        turn.set_store(failing_since=turn.state.store.failing_since or turn.now)
    turn.because(Reason.COMMIT_FENCED, f"generation {event.generation} step {event.step}")


# --- interruption ----------------------------------------------------------------------------------------------------


def _drain(turn: Turn, generation: GenerationRecord) -> None:
    """Agree on the last step, wait until it is committed, end the job.

    A save that is under way is left to come through first: nothing else is uploaded meanwhile.
    """
    statuses = statuses_of(turn, generation)
    durable = generation.durable_step
    late = pace.too_late(turn, generation)
    if generation.drain_step:
        hopeless = not turn.state.job.has_store or _is_withheld(turn, generation, generation.drain_step)
        if durable >= generation.drain_step or hopeless:
            end(turn, generation, ExitCode.INTERRUPTED, f"interrupted; {saved_text(turn, durable)}", Reason.INTERRUPTED)
        elif generation.save_step == generation.drain_step or _is_under_way(turn, generation):
            return
        elif late:
            _do_without(turn, generation, late)
        else:
            _save(turn, generation, generation.drain_step)
        return
    if len(statuses) < len(generation.members) or any(status.entered < 0 for status in statuses.values()):
        return
    target = max(status.entered for status in statuses.values())
    started = generation.resume.step if generation.resume is not None else 0
    can_seal = has_snapshots(turn, generation)
    newest = max(target, started) if can_seal else min(status.sealed for status in statuses.values())
    newest = newest if turn.state.job.has_store else 0
    if newest <= durable:
        end(turn, generation, ExitCode.INTERRUPTED, f"interrupted; {saved_text(turn, durable)}", Reason.NOTHING_TO_SAVE)
    elif late:
        _do_without(turn, generation, late)
    elif target <= started or not can_seal:
        _save(turn, generation, newest)
    else:
        save = generation.save_step if _is_under_way(turn, generation) else target
        turn.put(evolve(generation, drain_step=target, save_step=save), Reason.DRAIN_AGREED, f"step {target}")


def _is_under_way(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether a save may come through yet: its step is sealed by all."""
    sealed = min((status.sealed for status in statuses_of(turn, generation).values()), default=0)
    return durable_step(turn, generation) < generation.save_step <= sealed and not _missed(turn, generation)


def _do_without(turn: Turn, generation: GenerationRecord, why: str) -> None:
    """No save is begun any more; one that is under way may come through yet."""
    if not _is_under_way(turn, generation):
        text = f"interrupted; {why}; {saved_text(turn, durable_step(turn, generation))}"
        end(turn, generation, ExitCode.INTERRUPTED, text, Reason.GRACE_TOO_SHORT)


def drain_is_late(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether the workers can not be waited for any longer: a hung or dead one must not cost the save."""
    if not turn.interrupted:
        return False
    requests = [seen.record for seen in turn.state.cluster.requests.values()]
    if not requests:
        return False
    late_at = min(r.at + _DRAIN_SHARE * (r.deadline - r.at) for r in requests)
    sealed = [s.sealed for s in statuses_of(turn, generation).values()]
    if generation.drain_step and len(sealed) == len(generation.members) and min(sealed) >= generation.drain_step:
        return False
    if turn.now < late_at:
        turn.wake(late_at)
        return False
    return True


def salvage(turn: Turn, generation: GenerationRecord, acks: list[AckRecord]) -> None:
    """No world trains any more and none may start: commit the newest snapshot that all who are left hold, and end."""
    held = common_held(acks)
    durable = durable_step(turn, generation)
    late = pace.too_late(turn, generation)
    if late and _savable(turn, held, durable) and held is not None and generation.save_step != held.step:
        _do_without(turn, evolve(generation, save_step=0), late)
    elif is_saved(turn, generation, acks):
        root = generation.failures[0] if generation.failures else None
        text = f"interrupted; {saved_text(turn, durable)}"
        end(turn, generation, ExitCode.INTERRUPTED, text, Reason.INTERRUPTED, root)


def is_saved(turn: Turn, generation: GenerationRecord, acks: list[AckRecord], until: float | None = None) -> bool:
    """Whether nothing is left to commit of what all hold, or it can not be; else it is seen to, until `until`."""
    held = common_held(acks)
    if held is None or not _savable(turn, held, durable_step(turn, generation)) or _missed(turn, generation):
        return True
    if until is not None and (turn.now >= until or gave_up_saving(turn)):
        return True
    if until is not None:
        turn.wake(until)
    _save(turn, generation, held.step)
    commit(turn, generation)
    return False


def _savable(turn: Turn, held: Resume | None, durable: int) -> bool:
    return held is not None and held.step > durable and turn.state.job.has_store
