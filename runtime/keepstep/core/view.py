"""The job's records as one node has last seen them, and what they come to, counted as each of them arrives.

What only leaders need (nodes, acks, statuses, uploads) only leaders watch: of these, other nodes know their own. So
what comes and goes costs the leader something, and the others nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, Generic, NamedTuple, TypeVar

from keepstep.core.job import port_from
from keepstep.core.launch.table import RankTable
from keepstep.core.preflight_records import PreflightPlan, PreflightRecord
from keepstep.core.records import (
    AckRecord,
    CordonRecord,
    EtcdRecord,
    GenerationRecord,
    LeaderRecord,
    Member,
    NodeRecord,
    OrderRecord,
    Record,
    RequestRecord,
    Resume,
    Standing,
    StatusRecord,
    UploadRecord,
)
from keepstep.core.values import evolve, frozen

OF_NODES = (AckRecord, NodeRecord, PreflightRecord, StatusRecord, UploadRecord)
"""What nodes say of themselves, each under keys that nobody else writes."""

R = TypeVar("R", bound=Record)


@frozen
class Seen(Generic[R]):
    """A record and the revision at which it was written."""

    record: R
    revision: int


@frozen
class Tally:
    """What the generation's members come to: counted up and down, so that a turn of a large job costs no more.

    Attributes:
        gone: members whose node is not there, or is another one.
        failed: members whose worker failed in this generation; `done` those whose worker exited with 0, or who serve.
        stalled: members whose worker does not get on; `stalled_in_training` those of them that report steps.
        costliest: the largest share of training time that a snapshot takes if one is taken at each step.
        missed: shares of checkpoints that members could not upload.
    """

    generation: int = 0
    gone: int = 0
    failed: int = 0
    done: int = 0
    stalled: int = 0
    stalled_in_training: int = 0
    costliest: float = 0.0
    missed: int = 0


@frozen
class Cluster:
    """The job's records as last seen; `synced` once they were read at all since the watch began.

    `watched` is the newest revision that the watch, which is ordered, has told of: what is older is known or gone.
    `whole` where what all members say is watched, too. `members` has the node of each member of the generation by host.
    """

    synced: bool = False
    watched: int = 0
    whole: bool = False
    tally: Tally = Tally()
    members: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, Seen[NodeRecord]] = field(default_factory=dict)
    leader: Seen[LeaderRecord] | None = None
    generation: Seen[GenerationRecord] | None = None
    acks: Mapping[str, Seen[AckRecord]] = field(default_factory=dict)
    statuses: Mapping[str, Seen[StatusRecord]] = field(default_factory=dict)
    uploads: Mapping[str, Seen[UploadRecord]] = field(default_factory=dict)
    requests: Mapping[str, Seen[RequestRecord]] = field(default_factory=dict)
    orders: Mapping[str, Seen[OrderRecord]] = field(default_factory=dict)
    cordons: Mapping[str, Seen[CordonRecord]] = field(default_factory=dict)
    etcd: Seen[EtcdRecord] | None = None
    plan: Seen[PreflightPlan] | None = None
    checks: Mapping[str, Seen[PreflightRecord]] = field(default_factory=dict)


def with_node(cluster: Cluster, host: str, seen: Seen[NodeRecord] | None) -> Cluster:
    """A host's node came, changed, or went (None)."""
    new = evolve(cluster, nodes=_changed(cluster.nodes, host, seen))
    gone = cluster.tally.gone + _lacks(new, host) - _lacks(cluster, host)
    return new if gone == cluster.tally.gone else evolve(new, tally=evolve(cluster.tally, gone=gone))


def with_status(cluster: Cluster, host: str, seen: Seen[StatusRecord] | None) -> Cluster:
    """A member's status changed, or went (None)."""
    tally, statuses = cluster.tally, _changed(cluster.statuses, host, seen)
    old, new = _counted(cluster, cluster.statuses.get(host)), _counted(cluster, seen)
    new_cluster = evolve(cluster, statuses=statuses)
    if old == new:
        return new_cluster
    costliest = max(tally.costliest, new.cost)
    if new.cost < old.cost == tally.costliest:
        costliest = max((_counted(cluster, each).cost for each in statuses.values()), default=0.0)
    tally = evolve(
        tally,
        failed=tally.failed + new.failed - old.failed,
        done=tally.done + new.done - old.done,
        stalled=tally.stalled + new.stalled - old.stalled,
        stalled_in_training=tally.stalled_in_training + new.in_training - old.in_training,
        costliest=costliest,
    )
    return evolve(new_cluster, tally=tally)


def with_upload(cluster: Cluster, key: str, seen: Seen[UploadRecord] | None) -> Cluster:
    """A member's share of a checkpoint is uploaded, or its record went (None)."""
    missed = cluster.tally.missed + int(_missed(seen)) - int(_missed(cluster.uploads.get(key)))
    tally = evolve(cluster.tally, missed=missed)
    return evolve(cluster, uploads=_changed(cluster.uploads, key, seen), tally=tally)


def with_generation(cluster: Cluster, seen: Seen[GenerationRecord] | None) -> Cluster:
    """The generation changed, or went (None); what was said in older ones is let go."""
    known = cluster.generation
    if seen is not None and known is not None and seen.record.number == known.record.number:
        if seen.record.members == known.record.members:
            return evolve(cluster, generation=seen)
    return _with_another(cluster, seen)


def _with_another(cluster: Cluster, seen: Seen[GenerationRecord] | None) -> Cluster:
    number, members = (0, ()) if seen is None else (seen.record.number, seen.record.members)
    acks = {key: each for key, each in cluster.acks.items() if each.record.generation >= number}
    uploads = {key: each for key, each in cluster.uploads.items() if each.record.generation >= number}
    new = evolve(
        cluster,
        generation=seen,
        members={member.host: member.node_id for member in members},
        tally=Tally(number),
        acks=acks,
        uploads=uploads,
    )
    counted = [_counted(new, each) for each in cluster.statuses.values()]
    tally = Tally(
        number,
        gone=sum(_lacks(new, host) for host in new.members),
        failed=sum(each.failed for each in counted),
        done=sum(each.done for each in counted),
        stalled=sum(each.stalled for each in counted),
        stalled_in_training=sum(each.in_training for each in counted),
        costliest=max((each.cost for each in counted), default=0.0),
        missed=sum(1 for each in uploads.values() if _missed(each)),
    )
    return evolve(new, tally=tally)


def _changed(known: Mapping[str, Seen[R]], key: str, seen: Seen[R] | None) -> dict[str, Seen[R]]:
    return {each: old for each, old in known.items() if each != key} if seen is None else {**known, key: seen}


def _lacks(cluster: Cluster, host: str) -> int:
    """1 where the host is a member and its node is not there, or is another one."""
    wanted, seen = cluster.members.get(host), cluster.nodes.get(host)
    return 0 if wanted is None or (seen is not None and seen.record.node_id == wanted) else 1


class _Counted(NamedTuple):
    """What one member adds to the tally."""

    failed: int = 0
    done: int = 0
    stalled: int = 0
    in_training: int = 0
    cost: float = 0.0


def _counted(cluster: Cluster, seen: Seen[StatusRecord] | None) -> _Counted:
    """What a status adds; nothing where it is no member's word."""
    if seen is None or seen.record.generation != cluster.tally.generation:
        return _Counted()
    status = seen.record
    if cluster.members.get(status.host) != status.node_id:
        return _Counted()
    stalled = status.standing is Standing.RUNNING and status.stall is not None
    return _Counted(
        int(status.standing is Standing.FAILED),
        int(status.standing in (Standing.DONE, Standing.SERVING)),
        int(stalled),
        int(stalled and status.stall is not None and status.stall.joined),
        status.snapshot_cost_ratio,
    )


def _missed(seen: Seen[UploadRecord] | None) -> bool:
    return seen is not None and not seen.record.objects


def known_revision(cluster: Cluster, record: Record) -> int:
    """The revision that the record's key has as far as is known, 0 where it is absent."""
    seen: Seen[Any] | None
    match record:
        case GenerationRecord():
            seen = cluster.generation
        case LeaderRecord():
            seen = cluster.leader
        case NodeRecord():
            seen = cluster.nodes.get(record.host)
        case StatusRecord():
            seen = cluster.statuses.get(record.host)
        case RequestRecord():
            seen = cluster.requests.get(record.host)
        case AckRecord():
            seen = cluster.acks.get(record.key)
        case UploadRecord():
            seen = cluster.uploads.get(record.key)
        case OrderRecord():
            seen = cluster.orders.get(record.order_id)
        case CordonRecord():
            seen = cluster.cordons.get(record.host)
        case EtcdRecord():
            seen = cluster.etcd
        case PreflightPlan():
            seen = cluster.plan
        case PreflightRecord():
            seen = cluster.checks.get(record.host)
    return 0 if seen is None else seen.revision


PEERS_MAX = 8
"""So many hosts are asked for a snapshot before the store is."""


def peers_of(generation: GenerationRecord, rank: int) -> tuple[tuple[str, str, int], ...]:
    """Host, address and port of those whom `rank` may ask for a snapshot; each rank begins with the one behind it."""
    members = generation.members[rank + 1 :] + generation.members[:rank]
    return tuple((each.host, each.address, each.peer_port) for each in members if each.peer_port)[:PEERS_MAX]


def group_of(generation: GenerationRecord, rank: int) -> tuple[tuple[tuple[str, str, int], ...], int]:
    """Those with whom `rank` shares the reading of a checkpoint that nobody holds, and its place among them.

    Neighbours in the order of ranks; nobody where one of them gives nothing away.
    """
    first = rank - rank % PEERS_MAX
    members = generation.members[first : first + PEERS_MAX]
    if len(members) < 2 or not all(member.peer_port for member in members):
        return (), 0
    return tuple((each.host, each.address, each.peer_port) for each in members), rank - first


def table_of(generation: GenerationRecord, full: int) -> RankTable:
    """Who the members are and where their workers listen, of `full` hosts where none is missing."""
    number, members = generation.number, generation.members
    feeders = _addresses(generation.feeders, number)
    return RankTable(
        number, tuple(each.host for each in members), _addresses(members, number), full, generation.run, feeders
    )


def _addresses(hosts: tuple[Member, ...], number: int) -> tuple[str, ...]:
    return tuple(f"{each.address}:{port_from(each.port_base, number)}" for each in hosts)


def leavers(cluster: Cluster, old: GenerationRecord, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Those of the former members who are there still, and are not among the new ones."""
    stay = {member.host for member in members}
    former = dict.fromkeys((*old.members, *old.leaving))
    return tuple(member for member in former if member.host not in stay and _is_there(cluster, member))


def acks_of(cluster: Cluster, generation: GenerationRecord) -> list[AckRecord] | None:
    """The members' acknowledgements in rank order; None before all have come, and all who leave have stopped."""
    number, acks = generation.number, cluster.acks
    if len(acks) < len(generation.members):
        return None
    asked = [*generation.members, *(member for member in generation.leaving if _is_there(cluster, member))]
    if any(f"acks/{number}/{member.host}" not in acks for member in asked):
        return None
    return [acks[f"acks/{number}/{member.host}"].record for member in generation.members]


def _is_there(cluster: Cluster, member: Member) -> bool:
    seen = cluster.nodes.get(member.host)
    return seen is not None and seen.record.node_id == member.node_id


def acks_of_fresh(cluster: Cluster, generation: GenerationRecord) -> list[AckRecord]:
    """What those members would say who have run nothing yet: their nodes have said so, and need not be asked."""
    number, nodes = generation.number, cluster.nodes
    return [AckRecord(number, m.host, m.node_id) for m in generation.members if nodes[m.host].record.fresh]


def common_held(acks: list[AckRecord], without: Collection[tuple[int, str]] = ()) -> Resume | None:
    """The newest snapshot that all members hold verified, with one digest; `without` names some by step and digest."""
    if not acks:
        return None
    common = set(acks[0].held)
    for ack in acks[1:]:
        common &= set(ack.held)
    trusted = (held for held in common if (held.step, held.digest) not in without)
    best = max(trusted, key=lambda held: held.step, default=None)
    return None if best is None else Resume(best.step, best.digest)
