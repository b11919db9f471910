"""The job's records as one node has last seen them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from keepstep.core.records import (
    AckRecord,
    CordonRecord,
    EtcdRecord,
    GenerationRecord,
    LeaderRecord,
    NodeRecord,
    OrderRecord,
    Record,
    RequestRecord,
    StatusRecord,
    UploadRecord,
)

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Seen(Generic[R]):
    """A record and the revision at which it was written."""

    record: R
    revision: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """The job's records as last seen; `synced` once they were read at all since the watch began.

    `watched` is the newest revision that the watch, which is ordered, has told of: what is older is known or gone.
    """

    synced: bool = False
    watched: int = 0
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
    return 0 if seen is None else seen.revision
