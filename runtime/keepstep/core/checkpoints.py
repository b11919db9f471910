"""Slabs of this host: which may be written, which is verified, uploaded, restored; and what the workers are ordered."""

from __future__ import annotations

from keepstep.core.actions import (
    AllocateSlabs,
    ClearSeal,
    DropSlabs,
    HandSlabs,
    UploadSnapshot,
    VerifySlab,
    WriteOrders,
)
from keepstep.core.events import (
    AgentStarted,
    LayoutAnnounced,
    SlabSeal,
    SlabsLacking,
    SnapshotBad,
    SnapshotSealed,
    SnapshotUploaded,
    SnapshotVerified,
)
from keepstep.core.facts import Slab
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase, UploadRecord
from keepstep.core.state import State, Turn
from keepstep.core.world import store_answers

SLABS = 3
"""One being uploaded, one newest sealed, one being written."""
SLABS_MIN = 2
"""With two, none is written while one is uploaded; one alone would be torn whenever it is written."""
_ROOM_SHARE = 0.8
"""Of the memory that there is when a state's size is known: what training takes besides comes with the first step."""

NO_SLAB = -1
_SLOTS = 8


def on_agent_started(turn: Turn, event: AgentStarted) -> None:
    """Take over the slabs that init kept while a former agent was dead. Nothing in them is verified yet."""
    slabs = tuple(Slab(number, size_bytes) for number, size_bytes in event.slabs)
    largest = max((slab.size_bytes for slab in slabs), default=0)
    turn.set(seen_generation=event.seen_generation, former_generation=event.seen_generation)
    turn.set(slabs=slabs, next_slab=max((s.slab for s in slabs), default=-1) + 1, slab_bytes=largest)
    reload_seals(turn, event.seals)


def reload_seals(turn: Turn, seals: tuple[SlabSeal, ...]) -> None:
    """Believe the control page: a slab that was granted may be torn, whole, or untouched."""
    by_slab = {seal.slab: seal for seal in seals}
    for slab in turn.state.slabs:
        seal = by_slab.get(slab.slab)
        if seal is not None and seal.size_bytes > slab.size_bytes:
            seal = None
        if seal != slab.seal:
            turn.set_slab(slab.slab, seal=seal, digest="")


def on_layout_announced(turn: Turn, event: LayoutAnnounced) -> None:
    """The worker's state has a size now: see that there are enough slabs for it, and hand them over."""
    if all(worker.worker_id != event.worker_id for worker in turn.state.workers):
        turn.because(Reason.STALE_WORKER, event.worker_id)
        return
    turn.set(slab_bytes=event.size_bytes, layout=event.layout)
    missing = SLABS - len(_fitting(turn))
    if missing > 0:
        allowed = missing
        if event.room_bytes is not None and event.size_bytes:
            allowed = min(missing, int(_ROOM_SHARE * event.room_bytes / event.size_bytes))
        if SLABS - missing + allowed >= SLABS_MIN:
            _allocate(turn, allowed)
    _hand(turn, event.worker_id, "" if event.room_bytes is None else f"{event.room_bytes} bytes can be had")


def _allocate(turn: Turn, count: int) -> None:
    """Have so many more slabs made for the newest layout."""
    if not count:
        return
    make_room(turn, _SLOTS - count)
    numbers: list[int] = []
    for _ in range(count):
        number = free_slab_number(turn.state)
        turn.set(next_slab=number + 1)
        numbers.append(number)
    size_bytes = turn.state.slab_bytes
    turn.do(AllocateSlabs(tuple(numbers), size_bytes), Reason.SLABS_WANTED, f"{len(numbers)} of {size_bytes} bytes")
    turn.set(slabs=(*turn.state.slabs, *(Slab(number, size_bytes) for number in numbers)))


def _fitting(turn: Turn) -> list[Slab]:
    return [slab for slab in turn.state.slabs if slab.size_bytes >= turn.state.slab_bytes]


def _hand(turn: Turn, worker_id: str, why: str) -> None:
    """Tell the worker which slabs there are for its layout, and people where there are fewer than there should be."""
    fitting = _fitting(turn)
    saves = len(fitting) >= SLABS_MIN
    turn.set(saves=saves)
    if len(fitting) < SLABS:
        what = "no snapshot is taken while one is uploaded" if saves else "no snapshots are taken"
        detail = f"memory for {len(fitting)} snapshots of {turn.state.slab_bytes} bytes, {SLABS} are wanted"
        turn.because(Reason.SLABS_LACKING, f"{detail}: {what}" + (f"; {why}" if why else ""))
    numbers = tuple(slab.slab for slab in fitting) if saves else ()
    turn.do(HandSlabs(worker_id, turn.state.layout, numbers))


def on_slabs_lacking(turn: Turn, event: SlabsLacking) -> None:
    """There was less memory than it had seemed."""
    turn.set(slabs=tuple(slab for slab in turn.state.slabs if slab.slab not in event.slabs))
    if turn.state.workers:
        _hand(turn, turn.state.workers[0].worker_id, event.detail)


def make_room(turn: Turn, most: int) -> None:
    """Give back the slabs with the oldest snapshots until there are no more than so many; one that is read stays."""
    state = turn.state
    restoring = state.restore[0] if state.restore is not None and state.workers else NO_SLAB
    spare = [slab for slab in state.slabs if not slab.busy and slab.slab != restoring]
    spare.sort(key=lambda s: (s.size_bytes >= state.slab_bytes, s.seal.step if s.seal is not None else -1))
    gone = spare[: max(0, len(state.slabs) - most)]
    if gone:
        turn.set(slabs=tuple(slab for slab in state.slabs if slab not in gone))
        turn.do(DropSlabs(tuple(slab.slab for slab in gone)))


def free_slab_number(state: State) -> int:
    """The next slab number whose slot in the control page is not taken; there is one, see `make_room`."""
    taken = {slab.slab % _SLOTS for slab in state.slabs}
    number = state.next_slab
    while number % _SLOTS in taken:
        number += 1
    return number


def on_snapshot_sealed(turn: Turn, event: SnapshotSealed) -> None:
    """A slab holds a completed step."""
    if all(worker.worker_id != event.worker_id for worker in turn.state.workers):
        turn.because(Reason.STALE_WORKER, event.worker_id)
        return
    turn.set_slab(event.seal.slab, seal=event.seal, digest="")
    turn.set(completed=max(turn.state.completed, event.seal.step))
    turn.because(Reason.SNAPSHOT_SEALED, f"step {event.seal.step}")


def verify(turn: Turn) -> None:
    """Between generations, read every sealed snapshot once: only what is verified is offered for a resume.

    Also one that is still uploaded, which may take long, or for ever: nobody waits for a store with that.
    """
    if turn.state.workers:
        return
    for slab in sorted(turn.state.slabs, key=lambda s: -(s.seal.step if s.seal else 0)):
        if slab.seal is None or slab.digest:
            continue
        action = VerifySlab(f"verify:{slab.slab}:{slab.seal.sequence}", slab.slab, slab.seal.step, slab.seal.size_bytes)
        if turn.attempt(action, Reason.SNAPSHOT_SEALED, f"verify step {slab.seal.step}") and not slab.busy:
            turn.set_slab(slab.slab, busy=action.operation)


def on_snapshot_verified(turn: Turn, event: SnapshotVerified) -> None:
    """Every byte was read; the digest stands for the replicated state."""
    turn.landed(event.operation)
    release(turn, event.operation)
    for slab in turn.state.slabs:
        if slab.slab == event.slab and slab.seal is not None and slab.seal.step == event.step:
            turn.set_slab(slab.slab, digest=event.digest)
            turn.because(Reason.SNAPSHOT_VERIFIED, f"step {event.step}")


def on_snapshot_bad(turn: Turn, event: SnapshotBad) -> None:
    """A sealed slab does not read as a snapshot: it is not offered."""
    turn.landed(event.operation)
    release(turn, event.operation)
    turn.set_slab(event.slab, seal=None, digest="")
    turn.do(ClearSeal(event.slab), Reason.SNAPSHOT_BAD, f"step {event.step}: {event.detail}")


def drop_outgrown(turn: Turn) -> None:
    """Give back slabs that are too small for the layout, once a newer snapshot does not need them any more."""
    state = turn.state
    fitting = [s for s in state.slabs if s.size_bytes >= state.slab_bytes]
    if not any(s.seal is not None for s in fitting) or not state.workers:
        return
    restoring = state.restore[0] if state.restore is not None and not state.workers[0].restored else NO_SLAB
    gone = [s for s in state.slabs if s.size_bytes < state.slab_bytes and not s.busy and s.slab != restoring]
    newest = max((s.seal.step for s in fitting if s.seal is not None), default=0)
    gone = [s for s in gone if s.seal is None or s.seal.step < newest]
    if gone:
        turn.set(slabs=tuple(s for s in state.slabs if s not in gone))
        turn.do(DropSlabs(tuple(s.slab for s in gone)))


def choose_grant(turn: Turn) -> int:
    """The slab the worker may write next: never the newest sealed one, nor one that is being read."""
    state = turn.state
    current = state.orders.grant if isinstance(state.orders, WriteOrders) else NO_SLAB
    restoring = state.restore[0] if state.restore is not None and not state.workers[0].restored else NO_SLAB
    sealed = [s for s in state.slabs if s.seal is not None]
    newest = max(sealed, key=lambda s: (s.seal.step, s.seal.sequence) if s.seal else (0, 0), default=None)
    open_slabs = [
        s
        for s in state.slabs
        if s is not newest and not s.busy and s.slab != restoring and s.size_bytes >= state.slab_bytes > 0
    ]
    for slab in open_slabs:
        if slab.slab == current and slab.seal is None:
            return current
    save = turn.generation.save_step if turn.generation is not None else 0
    open_slabs = [s for s in open_slabs if not save or s.seal is None or s.seal.step != save]
    if not open_slabs:
        return NO_SLAB
    best = min(open_slabs, key=lambda s: (s.seal.step if s.seal else -1, s.slab))
    if best.seal is not None:
        turn.set_slab(best.slab, seal=None, digest="")
    return best.slab


def orders_for(turn: Turn) -> WriteOrders | None:
    """What this host's worker is to do; None while there is no worker."""
    state, generation = turn.state, turn.generation
    if not state.workers or generation is None or state.workers[0].stopping:
        return None
    worker = state.workers[0]
    restore_slab, restore_step = state.restore if state.restore is not None else (NO_SLAB, 0)
    return WriteOrders(
        generation=worker.generation,
        hold=state.held_at is not None,
        drain_step=generation.drain_step,
        grant=choose_grant(turn),
        snapshot_every=generation.snapshot_every,
        restore_slab=restore_slab,
        restore_step=restore_step,
        fingerprint=generation.repeat.step,
    )


# --- saving ----------------------------------------------------------------------------------------------------------


def upload(turn: Turn) -> None:
    """Upload this host's share of the step being saved, and say so; say also where the step was missed."""
    state, generation = turn.state, turn.generation
    if generation is None or not generation.save_step or generation.phase is Phase.ENDED or not turn.is_member:
        return
    step, number = generation.save_step, generation.number
    if state.uploaded is not None and (state.uploaded.generation, state.uploaded.step) == (number, step):
        seen = state.cluster.uploads.get(state.uploaded.key)
        if seen is None or seen.record != state.uploaded:
            said = "share uploaded" if state.uploaded.objects else "step missed"
            turn.put(state.uploaded, Reason.UPLOAD_STARTS, said)
        return
    slab = next((s for s in state.slabs if s.seal is not None and s.seal.step == step), None)
    if slab is None or slab.seal is None:
        if _missed(state, generation):
            turn.set(uploaded=UploadRecord(number, step, state.job.host, "", ()))
            upload(turn)
        return
    if slab.busy:
        return
    run, rank, world_size = generation.run, generation.rank_of(state.job.host), len(generation.members)
    action = UploadSnapshot(
        f"upload:{number}:{step}", slab.slab, step, slab.seal.size_bytes, number, run, rank, world_size
    )
    if turn.attempt(action, Reason.UPLOAD_STARTS, f"step {step}"):
        turn.set_slab(slab.slab, busy=action.operation)
        if state.store.saving_since is None:
            turn.set_store(saving_since=turn.now)


def _missed(state: State, generation: GenerationRecord) -> bool:
    """Whether this host can not come to hold the step any more."""
    newest = max((s.seal.step for s in state.slabs if s.seal is not None), default=0)
    return newest > generation.save_step or (not state.workers and newest < generation.save_step)


def on_snapshot_uploaded(turn: Turn, event: SnapshotUploaded) -> None:
    """This host's share lies in the store."""
    turn.landed(event.operation)
    release(turn, event.operation)
    record = UploadRecord(event.generation, event.step, turn.state.job.host, event.digest, event.objects, event.seconds)
    if event.operation.startswith("alone:"):
        turn.set(alone=record)
    elif event.generation == turn.state.seen_generation:
        turn.set(uploaded=record)
    else:
        turn.because(Reason.STALE_GENERATION, record.key)
    store_answers(turn)


def release(turn: Turn, operation: str) -> None:
    """An upload or a verification is over, well or not: it reads its slab no more."""
    for slab in turn.state.slabs:
        if slab.busy == operation:
            turn.set_slab(slab.slab, busy="")
