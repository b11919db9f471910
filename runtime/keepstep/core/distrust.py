"""A state of which the world dies at once, again and again, is given up for an older one: it may be what kills.

Bytes that read back as they were written can be bad all the same: a NaN that was saved, an optimizer gone wild.
"""

from __future__ import annotations

from keepstep.core.causes import FailureCause
from keepstep.core.reasons import Reason
from keepstep.core.records import AckRecord, Failure, GenerationRecord, Resume
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import common_held

FALLS_MAX = 2
"""So many times in a row the world may die of a state before it completes a step."""

_SIGKILL = 9


def falls_of(generation: GenerationRecord, root: Failure | None, acks: list[AckRecord]) -> tuple[Resume, ...]:
    """The states that the last worlds began with and died of at once, up to the one that the forming world follows."""
    began = generation.resume
    if root is None or began is None:
        return generation.falls
    if not _is_crash(root) or max(ack.completed for ack in acks) > began.step:
        return ()
    state = Resume(began.step, began.digest)
    return (*(fall for fall in generation.falls if fall == state), state)


def _is_crash(failure: Failure) -> bool:
    """Whether the state may be to blame: what the script raised, or the process did to itself."""
    by_itself = failure.cause is FailureCause.KILLED and failure.signal != _SIGKILL
    return failure.cause is FailureCause.USER_CODE or by_itself


def newest_trusted(generation: GenerationRecord, acks: list[AckRecord]) -> Resume | None:
    """The newest snapshot that every member holds verified, and that no world died of."""
    return common_held(acks, {(state.step, state.digest) for state in generation.distrusted})


def held_by_all(turn: Turn, generation: GenerationRecord, acks: list[AckRecord]) -> Resume | None:
    """The newest snapshot that every member holds, and that may be gone on from.

    One that ranks had taken before they were moved to other hosts is but half of a state there: what is a rank's own
    is another's. It will do only where the store has nothing, or does not answer.
    """
    held, store = newest_trusted(generation, acks), turn.state.store
    is_stored = not store.head_known or (store.head is not None and bool(store.head.manifest))
    if held is not None and held.step <= generation.repeat.moved and store.available and is_stored:
        return None
    return held


def choose_resume(turn: Turn, held: Resume | None) -> tuple[Resume | None, Reason]:
    """The newest state there is: in every slab, or in the store."""
    head = turn.state.store.head
    stored = Resume(head.step, head.digest, head.manifest) if head is not None and head.manifest else None
    if held is not None and (stored is None or held.step >= stored.step):
        return held, Reason.RESUME_FROM_SLABS
    if stored is not None:
        return stored, Reason.RESUME_FROM_STORE
    return None, Reason.FRESH_START


def changes(turn: Turn, generation: GenerationRecord, root: Failure | None, acks: list[AckRecord]) -> bool:
    """Whether the state to go on from is in question yet: one is to be given up, or HEAD's older one to be read.

    HEAD is known. Where nothing older is left, what was given up is taken again: better than to begin anew.
    """
    store, given_up = turn.state.store, generation.distrusted
    head = store.head
    falls = falls_of(generation, root, acks)
    if len(falls) >= FALLS_MAX:
        state = falls[-1]
        detail = f"step {state.step}, of which {len(falls)} worlds died at once"
        turn.put(evolve(generation, falls=(), distrusted=(*given_up, state)), Reason.STATE_DISTRUSTED, detail)
        return True
    if head is not None and head.manifest and Resume(head.step, head.digest) in given_up:
        turn.set_store(distrusted=(*store.distrusted, head.manifest), head_known=False)
        return True
    stored = head is not None and head.manifest
    if given_up and not stored and newest_trusted(generation, acks) is None:
        turn.set_store(distrusted=(), head_known=False)
        turn.put(evolve(generation, distrusted=()), Reason.STATE_DISTRUSTED, "nothing older is left")
        return True
    return False
