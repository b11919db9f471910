"""What the records come to is counted as they come and go; counted afresh it must be the same."""

from __future__ import annotations

import typing

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.codec import Digests, digest_of
from keepstep.core.preflight_records import PreflightPlan, PreflightRecord
from keepstep.core.reasons import Reason
from keepstep.core.records import (
    NOT_OF_NODES,
    OF_NODES_KEYS,
    AckRecord,
    CordonRecord,
    EtcdRecord,
    LeaderRecord,
    Member,
    NodeRecord,
    OrderRecord,
    Phase,
    Record,
    RequestRecord,
    Standing,
    StatusRecord,
    StoredObject,
    UploadRecord,
)
from keepstep.core.state import Decision, Note
from keepstep.core.values import evolve
from keepstep.core.view import OF_NODES, Cluster, Seen, with_generation, with_node, with_status, with_upload
from tests.unit.core.values import a_generation, a_turn

STATE = a_turn().state

HOSTS = ("algo-1", "algo-2", "algo-3")
hosts = st.sampled_from(HOSTS)
nodes = st.sampled_from(["one", "two"])
numbers = st.integers(3, 4)
shares = st.sampled_from([(), (StoredObject("o", "replicated", 0, 0, 1, "0"),)])

changes = st.one_of(
    st.builds(lambda host, node: ("node", host, NodeRecord(host, f"{host} {node}", "a", 1, 0)), hosts, nodes),
    st.builds(lambda host: ("node", host, None), hosts),
    st.builds(
        lambda host, node, number, standing, cost: (
            "status",
            host,
            StatusRecord(host, f"{host} {node}", number, standing, snapshot_cost_ratio=cost),
        ),
        hosts, nodes, numbers, st.sampled_from(list(Standing)), st.sampled_from([0.0, 0.1, 0.5]),
    ),
    st.builds(lambda host: ("status", host, None), hosts),
    st.builds(
        lambda host, number, objects: ("upload", host, UploadRecord(number, 8, host, "d", objects)),
        hosts, numbers, shares,
    ),
    st.builds(lambda host, number: ("upload", host, number), hosts, numbers),
    st.builds(
        lambda number, who: ("generation", "", (number, who)),
        numbers, st.lists(st.tuples(hosts, nodes), unique_by=lambda each: each[0], max_size=3),
    ),
    st.just(("generation", "", None)),
)  # fmt: skip


def applied(cluster: Cluster, change: tuple[str, str, object], revision: int) -> Cluster:
    kind, host, value = change
    match kind:
        case "node":
            return with_node(cluster, host, None if value is None else Seen(value, revision))
        case "status":
            return with_status(cluster, host, None if value is None else Seen(value, revision))
        case "upload" if isinstance(value, int):
            return with_upload(cluster, UploadRecord(value, 8, host, "", ()).key, None)
        case "upload":
            return with_upload(cluster, value.key, Seen(value, revision))
    if value is None:
        return with_generation(cluster, None)
    number, who = value
    members = tuple(Member(name, f"{name} {node}") for name, node in who)
    return with_generation(cluster, Seen(a_generation(number=number, phase=Phase.READY, members=members), revision))


def counted(cluster: Cluster) -> tuple[object, ...]:
    generation = cluster.generation.record if cluster.generation is not None else None
    members = {member.host: member.node_id for member in generation.members} if generation is not None else {}
    there = {host: seen.record.node_id for host, seen in cluster.nodes.items()}
    words = [
        seen.record
        for host, seen in cluster.statuses.items()
        if generation is not None
        and seen.record.generation == generation.number
        and members.get(host) == seen.record.node_id
    ]
    return (
        members,
        sum(1 for host, node in members.items() if there.get(host) != node),
        sum(1 for word in words if word.standing is Standing.FAILED),
        sum(1 for word in words if word.standing in (Standing.DONE, Standing.SERVING)),
        max((word.snapshot_cost_ratio for word in words), default=0.0),
        sum(1 for seen in cluster.uploads.values() if not seen.record.objects),
    )


@given(st.lists(changes, max_size=30))
def test_what_is_counted_on_the_way_is_what_is_there(history):
    cluster = Cluster()
    for revision, change in enumerate(history, 1):
        cluster = applied(cluster, change, revision)
        tally = cluster.tally
        told = (cluster.members, tally.gone, tally.failed, tally.done, tally.costliest, tally.missed)
        assert told == counted(cluster)


@given(st.lists(changes, max_size=20))
def test_a_digest_made_from_the_one_before_is_that_of_the_whole(history):
    digests, cluster = Digests(), Cluster()
    for revision, change in enumerate(history, 1):
        cluster = applied(cluster, change, revision)
        decision = Decision(evolve(STATE, cluster=cluster), (), (Note(Reason.NOTHING_TO_DO),))
        assert digests.of("", 1.0, decision) == digest_of("", 1.0, decision)


def test_all_that_members_say_lies_outside_of_what_everybody_watches():
    records = (
        AckRecord(3, "algo-1", "one"), StatusRecord("algo-1", "one", 3, Standing.RUNNING),
        UploadRecord(3, 8, "algo-1", "d", ()), NodeRecord("algo-1", "one", "a", 1, 0), LeaderRecord("algo-1", "one"),
        a_generation(), RequestRecord("algo-1", "sigterm", 1.0, 2.0), OrderRecord("o", "operator", 1.0),
        CordonRecord("algo-1", "operator", 1.0), EtcdRecord(("algo-1",)),
        PreflightPlan(1, ()), PreflightRecord("algo-1", "one", 1),
    )  # fmt: skip
    assert {type(record) for record in records} == set(typing.get_args(Record))
    first, last = NOT_OF_NODES
    for record in records:
        assert record.key.startswith(OF_NODES_KEYS) == isinstance(record, OF_NODES)
        assert (first <= record.key < last) != isinstance(record, OF_NODES)
