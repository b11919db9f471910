"""Whom a node asks for a snapshot that others hold in memory."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.codec import decode_record
from keepstep.core.records import GenerationRecord, Member, NodeRecord, Phase
from keepstep.core.view import PEERS_MAX, peers_of

NAMES = [f"algo-{n}" for n in range(1, 13)]
MEMBERS = tuple(Member(name, f"{name}-x", f"at {name}", 20000, 700) for name in NAMES)
GENERATION = GenerationRecord(3, Phase.READY, "algo-1-x", MEMBERS)


def test_those_behind_a_rank_are_asked_first_and_then_those_before_it():
    found = peers_of(GENERATION, 10)
    assert found[0] == ("algo-12", "at algo-12", 700)
    assert [host for host, _, _ in found[1:]] == NAMES[:7]
    assert len(found) == PEERS_MAX


def test_who_gives_nothing_is_not_asked():
    silent = tuple(each._replace(peer_port=0) if each.host in NAMES[2:5] else each for each in MEMBERS)
    assert [host for host, _, _ in peers_of(replace(GENERATION, members=silent), 1)] == [*NAMES[5:], NAMES[0]]


def test_a_record_of_a_node_that_knows_of_no_such_thing_can_be_read():
    text = '{"host":"algo-1","node_id":"x","address":"a","lease":1,"seen_generation":4,"kind":"node"}'
    assert decode_record(text) == NodeRecord("algo-1", "x", "a", 1, 4, 0)
