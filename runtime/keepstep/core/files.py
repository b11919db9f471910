"""Checkpoints that the script writes by itself: what is whole is committed, and put back before the next start.

An edition is a copy of the newest whole files, made aside by whoever watches the folder. The host of rank 0 alone
commits its editions; all hosts put back the one that the generation's record names. Nothing of this is done by itself
for a script that says how it is doing: its state is in slabs.
"""

from __future__ import annotations

from keepstep.core.actions import KeepFiles, PutBackFiles, SettleFiles, SweepStore
from keepstep.core.causes import FailureCause
from keepstep.core.events import FilesCopied, FilesKept, FilesPutBack, FilesSettled, FilesStuck
from keepstep.core.reasons import Reason
from keepstep.core.records import AckRecord, Failure, GenerationRecord, Phase
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import gave_up_saving, store_answers


def watches(turn: Turn) -> bool:
    """Whether the script's folder is watched: as the policy says; by itself, where the script says nothing."""
    state, generation = turn.state, turn.generation
    if not state.job.watch or not state.job.has_store:
        return False
    silent = not state.files.heard and (generation is None or generation.resume is None)
    return silent or state.policy.checkpoint.watch != "auto"


def _is_keeper(turn: Turn) -> bool:
    """Whether what lies in this host's folder is what the job would go on from: it has rank 0, or had it last.

    A host that was rank 0 once, and was out since, has what the others have left behind long ago.
    """
    generation, state = turn.generation, turn.state
    if generation is None or not turn.is_member or state.trained_rank != 0 or not watches(turn):
        return False
    return state.spawned == (generation.number if generation.phase is Phase.READY else generation.settled)


def last_kept(turn: Turn) -> str:
    """The manifest of what this host has committed as rank 0 of the last world; empty where it has not."""
    generation, files = turn.generation, turn.state.files
    is_last = generation is not None and _is_keeper(turn) and files.kept_in >= generation.settled > 0
    return files.manifest if is_last else ""


def keep(turn: Turn) -> None:
    """Commit the newest edition, where it is not committed yet."""
    generation, edition = turn.generation, turn.state.files.edition
    if generation is None or edition <= turn.state.files.kept or not _is_keeper(turn):
        return
    if turn.state.store.fenced < generation.number and not turn.state.store.refused:
        action = KeepFiles(f"files:{generation.number}:{edition}", edition, generation.number, generation.run)
        turn.attempt(action, Reason.FILES_CHANGED, f"edition {edition}")


def settled(turn: Turn, *, durable: bool = True) -> bool:
    """Whether the folder was gone over since the worker ended, or had its time, and what was found is committed.

    Args:
        turn: the turn.
        durable: False where it is enough to have a copy.
    """
    if not _is_keeper(turn):
        return True
    state = turn.state
    mark = 2 * state.spawns + (0 if state.workers else 1)
    if state.files.settled < mark:
        turn.attempt(SettleFiles(f"settle:{mark}", mark), Reason.FILES_CHANGED, "the last of them")
        return False
    fenced = turn.generation is not None and state.store.fenced >= turn.generation.number
    return not durable or state.files.kept >= state.files.edition or fenced or gave_up_saving(turn)


def wanted(turn: Turn, acks: list[AckRecord]) -> str:
    """The manifest of what the next world goes on from: what rank 0 committed last, else what the store has."""
    kept = [ack.files for ack in acks if ack.files and ack.files not in turn.state.store.corrupt]
    return kept[0] if kept else turn.state.store.files


def has_own(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether this host is alone and was before: its folder may be ahead of the store, and nobody has to be like it."""
    was_here = bool(turn.state.spawned or turn.state.former_generation)
    return was_here and len(generation.members) == 1 and turn.is_member and watches(turn)


def put_right(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether the script finds in its folder what it is to go on from; has it put there."""
    state, number = turn.state, generation.number
    if not watches(turn) or state.files.put_back == number:
        return True
    own = has_own(turn, generation)  # where there is neither, the folder is looked at before the script writes to it
    if state.failure is not None and state.failure_generation == number:
        return False
    if generation.files in state.store.corrupt:
        _fail(turn, generation, "no files to go on from")
        return False
    action = PutBackFiles(f"put_back:{number}", number, generation.files, own)
    turn.attempt(action, Reason.RESTORE_WANTED, generation.files)
    return False


def _fail(turn: Turn, generation: GenerationRecord, message: str) -> None:
    host = turn.state.job.host
    if turn.state.failure is None:
        rank, what = generation.rank_of(host), "NotPutBack"
        failure = Failure(FailureCause.STORE, host, turn.now, rank, error_type=what, message=message)
        turn.set(failure=failure, failure_generation=generation.number)
        turn.because(Reason.FILES_STUCK, message)


def on_files_copied(turn: Turn, event: FilesCopied) -> None:
    """What the script wrote is whole, and a copy of it lies aside."""
    _set(turn, edition=max(event.edition, turn.state.files.edition))
    turn.because(Reason.FILES_CHANGED, f"edition {event.edition}: {', '.join(event.sets)}")


def on_files_settled(turn: Turn, event: FilesSettled) -> None:
    """The folder was gone over."""
    turn.landed(event.operation)
    files = turn.state.files
    _set(turn, settled=max(event.mark, files.settled), edition=max(event.edition, files.edition))


def on_files_kept(turn: Turn, event: FilesKept) -> None:
    """The store has an edition."""
    turn.landed(event.operation)
    store_answers(turn)
    turn.set_store(failing_since=None)
    kept_in = int(event.operation.split(":")[1])
    if event.edition >= turn.state.files.kept:
        _set(turn, kept=event.edition, manifest=event.manifest, number=event.number, kept_in=kept_in)
    turn.because(Reason.FILES_KEPT, f"{event.manifest}, {event.uploaded_bytes} bytes in {event.seconds:.1f} s")
    resume = None if turn.generation is None else turn.generation.resume
    turn.do(SweepStore(kept_in, (resume.manifest,) if resume is not None and resume.manifest else ()))


def on_files_put_back(turn: Turn, event: FilesPutBack) -> None:
    """The script's folder holds what it is to go on from."""
    turn.landed(event.operation)
    _set(turn, put_back=event.generation, edition=max(event.edition, turn.state.files.edition))
    turn.because(Reason.FILES_PUT_BACK, f"{event.brought} sets brought, {event.aside} files moved aside")


def on_files_stuck(turn: Turn, event: FilesStuck) -> None:
    """The folder can not be written to: the script could not either."""
    turn.landed(event.operation)
    if turn.generation is not None:
        _fail(turn, turn.generation, event.detail)


def _set(turn: Turn, **changes: object) -> None:
    turn.set(files=evolve(turn.state.files, **changes))
