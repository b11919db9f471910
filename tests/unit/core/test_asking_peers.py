"""Whom a node asks for a snapshot that others hold in memory."""

from __future__ import annotations

from keepstep.core.codec import decode_record
from keepstep.core.records import GenerationRecord, Member, NodeRecord, Phase
from keepstep.core.values import evolve
from keepstep.core.view import PEERS_MAX, Cluster, Seen, peers_of

NAMES = [f"algo-{n}" for n in range(1, 13)]
GENERATION = GenerationRecord(3, Phase.READY, "algo-1-x", tuple(Member(name, f"{name}-x") for name in NAMES))


def known(**changes: NodeRecord | None) -> Cluster:
    """A cluster of twelve hosts, all of which give, but for what is said of some."""
    nodes = {name: NodeRecord(name, f"{name}-x", f"at {name}", 1, peer_port=700) for name in NAMES}
    for name, record in changes.items():
        key = name.replace("_", "-")
        del nodes[key]
        if record is not None:
            nodes[key] = record
    return evolve(Cluster(), nodes={name: Seen(record, 1) for name, record in nodes.items()})


def test_those_behind_a_rank_are_asked_first_and_then_those_before_it():
    found = peers_of(known(), GENERATION, 10)
    assert found[0] == ("algo-12", "at algo-12", 700)
    assert [host for host, _, _ in found[1:]] == NAMES[:7]
    assert len(found) == PEERS_MAX


def test_who_is_gone_or_new_or_gives_nothing_is_not_asked():
    cluster = known(
        algo_3=None,
        algo_4=NodeRecord("algo-4", "another", "at algo-4", 1, peer_port=700),
        algo_5=NodeRecord("algo-5", "algo-5-x", "at algo-5", 1, 0),
    )
    assert [host for host, _, _ in peers_of(cluster, GENERATION, 1)] == [*NAMES[5:], NAMES[0]]


def test_a_record_of_a_node_that_knows_of_no_such_thing_can_be_read():
    text = '{"host":"algo-1","node_id":"x","address":"a","lease":1,"seen_generation":4,"kind":"node"}'
    assert decode_record(text) == NodeRecord("algo-1", "x", "a", 1, 4, 0)
