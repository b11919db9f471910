"""The lease, the node's own record, the leader's key, and the acknowledgement of a new generation."""

from __future__ import annotations

from keepstep.core import files
from keepstep.core.actions import GrantLease
from keepstep.core.causes import FailureCause
from keepstep.core.events import LeaseGranted, LeaseLost, LeaseRenewed
from keepstep.core.facts import Lease
from keepstep.core.reasons import Reason
from keepstep.core.records import AckRecord, Failure, Held, LeaderRecord, NodeRecord, Phase
from keepstep.core.state import Turn
from keepstep.core.values import evolve


def on_lease_granted(turn: Turn, event: LeaseGranted) -> None:
    """The right to act begins."""
    turn.landed("lease")
    turn.set(lease=Lease(event.lease, event.deadline))
    if not turn.state.cluster.whole:  # what it had said under an older lease went with that, and nobody told it so
        turn.set_cluster(nodes={}, acks={}, statuses={}, uploads={})
    turn.because(Reason.LEASE_GRANTED)


def on_lease_renewed(turn: Turn, event: LeaseRenewed) -> None:
    """The right to act goes on, unless it had lapsed: a lapsed lease is never taken up again."""
    lease = turn.state.lease
    if lease is not None and lease.lease == event.lease and turn.now < lease.deadline:
        turn.set(lease=Lease(event.lease, max(event.deadline, lease.deadline)))


def on_lease_lost(turn: Turn, event: LeaseLost) -> None:
    """The coordinator no longer knows the lease."""
    if turn.state.lease is not None and turn.state.lease.lease == event.lease:
        _fence(turn)


def keep_lease(turn: Turn) -> None:
    """Fence when the lease lapsed; ask for one where there is none."""
    lease = turn.state.lease
    if lease is not None and turn.now >= lease.deadline:
        _fence(turn)
    if turn.state.lease is None:
        ttl_s = turn.state.policy.coordination.lease
        turn.attempt(GrantLease("lease", ttl_s), Reason.LEASE_WANTED)
    elif lease is not None:
        turn.wake(lease.deadline)


def _fence(turn: Turn) -> None:
    """Give up the right to act. Workers stop in this same turn, since they are bound to it."""
    state = turn.state
    turn.set(lease=None, flight={k: at for k, at in state.flight.items() if not k.startswith("put:")})
    turn.because(Reason.LEASE_EXPIRED)
    alive = [(w.generation, w.rank, w.entered) for w in state.workers if not w.stopping]
    alive += [(s.generation, s.rank, 0) for s in state.servers if s.rank >= 0 and not s.stopping and not s.ended]
    if alive and state.failure is None:
        generation, rank, entered = alive[0]
        failure = Failure(FailureCause.LEASE_LOST, state.job.host, turn.now, rank, entered)
        turn.set(failure=failure, failure_generation=generation)


def register(turn: Turn) -> None:
    """Have this incarnation's record stand under the node's key."""
    state, job = turn.state, turn.state.job
    if state.lease is None or not state.cluster.synced or is_registered(turn):
        return
    seen = state.seen_generation
    fresh = not (seen or state.spawned or state.slabs)
    lease, ports = state.lease.lease, (job.port_base, job.peer_port)
    turn.put(NodeRecord(job.host, job.node_id, job.address, lease, seen, *ports, fresh), Reason.NODE_REGISTERS)


def is_registered(turn: Turn) -> bool:
    """Whether the others see this incarnation, under the lease it holds now."""
    state = turn.state
    seen = state.cluster.nodes.get(state.job.host)
    if seen is None or state.lease is None or not turn.has_lease:
        return False
    return (seen.record.node_id, seen.record.lease) == (state.job.node_id, state.lease.lease)


def claim_leadership(turn: Turn) -> None:
    """Take the leader's key where nobody has it."""
    state = turn.state
    if state.cluster.leader is None and state.cluster.synced and is_registered(turn) and state.lease is not None:
        turn.put(LeaderRecord(state.job.host, state.job.node_id, state.lease.lease), Reason.LEADER_WANTED)


def acknowledge(turn: Turn) -> None:
    """Once no worker is left and every sealed snapshot is verified, say so to the leader."""
    state, generation = turn.state, turn.generation
    if generation is None or generation.phase is not Phase.FORMING or turn.processes:
        return
    if not generation.asks(state.job.node_id):
        return
    if state.recovery is not None and not state.recovery.stopped_at:
        turn.set(recovery=evolve(state.recovery, stopped_at=turn.now))
    if not is_registered(turn) or any(slab.seal is not None and not slab.digest for slab in state.slabs):
        return
    if not files.settled(turn, durable=turn.interrupted or len(generation.members) > 1):
        return
    held = sorted({(s.seal.step, s.digest) for s in state.slabs if s.seal is not None}, reverse=True)
    ack = AckRecord(
        generation.number,
        state.job.host,
        state.job.node_id,
        state.completed,
        tuple(Held(step, digest) for step, digest in held),
        state.failure,
        state.store.corrupt,
        files.last_kept(turn),
    )
    seen = state.cluster.acks.get(ack.key)
    if seen is None or seen.record != ack:
        turn.put(ack, Reason.READY_TO_JOIN, f"generation {generation.number}, holds {[step for step, _ in held]}")
