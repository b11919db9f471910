"""What the records say of one generation, and how the leader ends it."""

from __future__ import annotations

from keepstep.core.actions import Measure, Report
from keepstep.core.launch.parameter_server import SERVED
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, Phase, Standing, StatusRecord
from keepstep.core.state import Turn
from keepstep.core.values import evolve


def statuses_of(turn: Turn, generation: GenerationRecord) -> dict[str, StatusRecord]:
    """The members' statuses within this generation, by host."""
    found = {}
    for member in generation.members:
        seen = turn.state.cluster.statuses.get(member.host)
        if seen is not None and seen.record.node_id == member.node_id and seen.record.generation == generation.number:
            found[member.host] = seen.record
    return found


def has_snapshots(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether all members have the memory for them: without, nothing of this world can be kept."""
    return all(status.saves for status in statuses_of(turn, generation).values())


def is_done(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether the training has come to its end: every worker has, or the one that all others serve."""
    if turn.state.cluster.tally.done == len(generation.members):
        return True
    chief = statuses_of(turn, generation).get(generation.members[0].host) if generation.members else None
    return turn.state.job.strategy in SERVED and chief is not None and chief.standing is Standing.DONE


def end(
    turn: Turn, generation: GenerationRecord, code: int, verdict: str, reason: Reason, root: Failure | None = None
) -> bool:
    """The job is over, with this exit code on every host; False where that can not be put now."""
    ended = evolve(generation, phase=Phase.ENDED, exit_code=int(code), verdict=verdict, root=root, save_step=0)
    return turn.put(ended, reason, verdict)


def durable_step(turn: Turn, generation: GenerationRecord) -> int:
    """The newest committed step, as far as this node knows."""
    head = turn.state.store.head
    return max(generation.durable_step, head.step if head is not None else 0)


def saved_text(turn: Turn, durable: int) -> str:
    """What a job that did not reach its last step says at its end."""
    if durable:
        return f"saved up to step {durable}"
    own = turn.state.files.manifest or turn.state.store.files or (turn.generation is not None and turn.generation.files)
    return "the script's own files are saved" if own else "nothing was saved yet"


def gave_up_saving(turn: Turn) -> bool:
    """The store takes nothing, and the grace that an interruption would leave is spent."""
    refused, since = turn.state.store.refused, turn.state.store.failing_since
    if refused or since is None:
        return bool(refused)
    turn.wake(since + turn.state.policy.interruption.grace)
    return turn.now >= since + turn.state.policy.interruption.grace


def store_answers(turn: Turn) -> None:
    """The store did what was asked: whatever alarm there was is over."""
    if not turn.state.store.available:
        turn.do(Report(Measure.STORE_AVAILABLE, 1.0), Reason.STORE_RECOVERED)
        turn.set_store(available=True, failing_since=None, refused="")
