"""The end: workers are stopped, hosts leave together, those with etcd last, and the exit code is the job's."""

from __future__ import annotations

from keepstep.core import charges, elastic, files, gpus
from keepstep.core.actions import CommitCheckpoint, UploadSnapshot
from keepstep.core.facts import Slab
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Member, Standing
from keepstep.core.restarts import hint_for
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import durable_step, statuses_of

BARRIER_S = 10.0
"""How long a host waits for the others at the exit barrier."""

_LAST_OUT_S = 2.0
_ALONE_S = 60.0


def leave_together(turn: Turn) -> None:
    """Once the job has ended and this host's worker is gone, exit when the leader says that all have come."""
    state, generation = turn.state, turn.generation
    if generation is None or not turn.is_over or turn.processes or not files.settled(turn):
        return
    if state.leaving_at is None:
        turn.set(leaving_at=turn.now)
    since = state.leaving_at if state.leaving_at is not None else turn.now
    known = state.cluster.nodes if state.cluster.whole else state.cluster.members
    others = [m for m in generation.members if m.host != state.job.host and m.host in known]
    if turn.leads and state.cluster.whole and not generation.together and _has_left(turn, generation, others):
        turn.put(evolve(generation, together=True), Reason.LEAVING, "all have come")
    heard_at = state.together_at if generation.together else None
    last_at = since + BARRIER_S
    if heard_at is not None and not turn.in_flight(gpus.KEEPING) and not turn.in_flight(charges.KEEPING):
        last_at = min(last_at, heard_at + _LAST_OUT_S if _keeps_etcd(turn) and others else turn.now)
    if turn.now >= last_at or not turn.has_lease:
        turn.leave(generation.exit_code or 0, generation.verdict, Reason.LEAVING, hint_for(generation.root))
    else:
        turn.wake(last_at)


def _has_left(turn: Turn, generation: GenerationRecord, others: list[Member]) -> bool:
    """Whether this node and the other members that are there have no worker any more, and have said so."""
    statuses = statuses_of(turn, generation)
    own = [turn.state.job.host] if turn.is_member else []
    hosts = [*own, *(member.host for member in others)]
    return all(host in statuses and statuses[host].standing is Standing.LEFT for host in hosts)


def _keeps_etcd(turn: Turn) -> bool:
    seen = turn.state.cluster.etcd
    hosts: tuple[str, ...] = turn.state.job.etcd_hosts if seen is None else seen.record.hosts
    return turn.state.job.host in hosts


def save_alone(turn: Turn, since: float) -> bool:
    """Commit the newest snapshot as that of a world of one; True once there is nothing left to do.

    For a member that can reach nobody any more, where the others can not train without it. Whoever is wrong about that
    is refused by HEAD, which is then of a newer generation.
    """
    state, generation = turn.state, turn.generation
    if generation is None or not turn.is_member or not state.job.has_store or turn.now >= since + _ALONE_S:
        return True
    slab = max((s for s in state.slabs if s.seal is not None and s.digest), key=_step_of, default=None)
    done = slab is None or _step_of(slab) <= durable_step(turn, generation) or state.store.fenced >= generation.number
    if done or slab is None or len(generation.members) - 1 >= elastic.limits(turn)[0]:
        return True
    turn.wake(since + _ALONE_S)
    _save_alone(turn, generation, slab)
    return False


def _save_alone(turn: Turn, generation: GenerationRecord, slab: Slab) -> None:
    alone, step, number = turn.state.alone, _step_of(slab), generation.number
    if alone is None or (alone.generation, alone.step) != (number, step):
        assert slab.seal is not None, "only what is sealed is chosen"
        # this very step may be committed by all, or by another one that is alone, and not be heard of here: no object
        # of theirs is ever written over
        run = f"{generation.run}-alone{generation.rank_of(turn.state.job.host)}"
        action = UploadSnapshot(f"alone:{number}:{step}", slab.slab, step, slab.seal.size_bytes, number, run, 0, 1)
        if turn.attempt(action, Reason.SAVED_ALONE, f"upload of step {step}"):
            turn.set_slab(slab.slab, busy=action.operation)
        return
    commit = CommitCheckpoint(
        f"commit:{number}:{step}:alone", number, step, generation.run, alone.digest, 1, alone.objects
    )
    turn.attempt(commit, Reason.SAVED_ALONE, f"commit of step {step}")


def _step_of(slab: Slab) -> int:
    return slab.seal.step if slab.seal is not None else 0
