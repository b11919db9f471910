"""Which straggler is looked at beside whom, and how often."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core import codec
from keepstep.core.profiles import Profile, Straggler
from keepstep.core.profiling import AGAIN_S, ask, healthy_peer
from keepstep.core.records import Member, Phase, Standing, StatusRecord
from keepstep.core.splits import Part, Split
from keepstep.core.view import Seen
from tests.unit.core.values import a_generation, a_turn

HOSTS = ("algo-1", "algo-2", "algo-3", "algo-4")


def split(work_s: float, step: int = 60) -> Split:
    return Split(step, 5, 0.0, work_s, 0.0, 0.0)


def straggler(host: str, part: Part = Part.COMPUTE) -> Straggler:
    return Straggler(host, HOSTS.index(host), part, 2.0, 0.02, 0.1, 0.2, 40, 1.0)


def a_world(now: float = 1_000.0, **changes: object):
    """A leader's turn in a world of four: the last is slow, the second nearest to the others' median."""
    members = tuple(Member(host, f"node of {host}") for host in HOSTS)
    generation = a_generation(phase=Phase.READY, members=members, **changes)
    work_s = dict(zip(HOSTS, (0.010, 0.020, 0.024, 0.060), strict=True))
    turn = a_turn(now=now, hosts=HOSTS)
    statuses = {
        member.host: Seen(
            StatusRecord(*member[:2], generation.number, Standing.RUNNING, splits=(split(work_s[member.host]),)), 1
        )
        for member in members
    }
    turn.set_cluster(statuses=statuses)
    return turn, generation


def put(turn, monkeypatch) -> list[Profile]:
    """What is put, whoever holds the lease."""
    found: list[Profile] = []
    monkeypatch.setattr(turn, "put", lambda record, *why: found.append(record.profile) or True)
    return found


def test_the_healthy_peer_is_the_one_nearest_to_the_median(monkeypatch):
    turn, generation = a_world()
    found = put(turn, monkeypatch)
    assert ask(turn, generation, [straggler("algo-4")])
    (profile,) = found
    assert (profile.number, profile.at, profile.hosts) == (1, 1_000.0, ("algo-4", "algo-2"))
    assert (profile.split, profile.peer_split, profile.asked) == (split(0.060), split(0.020), ("3:compute",))


@given(st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 10_000).map(lambda ms: split(ms / 1e3)), min_size=1))
def test_no_host_is_nearer_to_the_middle(splits):
    peer = splits[healthy_peer(splits)].work_s
    below = sum(each.work_s < peer for each in splits.values())
    above = sum(each.work_s > peer for each in splits.values())
    assert abs(below - above) <= 1 + sum(each.work_s == peer for each in splits.values())


def test_who_is_slow_is_no_peer(monkeypatch):
    turn, generation = a_world()
    found = put(turn, monkeypatch)
    assert ask(turn, generation, [straggler("algo-4"), straggler("algo-2")])
    assert found[0].peer in ("algo-1", "algo-3")
    assert not ask(turn, generation, [straggler(host) for host in HOSTS])


@pytest.mark.parametrize(
    ("slow", "later_s", "wanted"),
    [
        ([straggler("algo-4")], 2 * AGAIN_S, None),
        ([straggler("algo-4", Part.DATA)], AGAIN_S, "3:data"),
        ([straggler("algo-4", Part.DATA)], AGAIN_S - 1.0, None),
        ([straggler("algo-4"), straggler("algo-3")], AGAIN_S, "2:compute"),
    ],
)
def test_each_part_of_each_is_looked_at_once_and_not_all_at_the_same_time(monkeypatch, slow, later_s, wanted):
    former = Profile(1, 1_000.0, straggler("algo-4"), "algo-2", split(0.06), split(0.02), ("3:compute",))
    turn, generation = a_world(1_000.0 + later_s, profile=former)
    found = put(turn, monkeypatch)
    assert ask(turn, generation, slow) is (wanted is not None)
    assert [(profile.number, profile.asked) for profile in found] == ([(2, ("3:compute", wanted))] if wanted else [])


def test_a_generation_has_only_so_many(monkeypatch):
    asked = tuple(f"{rank}:data" for rank in range(8))
    former = Profile(8, 0.0, straggler("algo-4"), "algo-2", split(0.06), split(0.02), asked)
    turn, generation = a_world(profile=former)
    assert not ask(turn, generation, [straggler("algo-4")])


def test_a_record_of_before_there_were_profiles_is_read():
    raw = json.loads(codec.encode_record(a_generation()))
    del raw["profile"]
    assert codec.decode_record(json.dumps(raw)) == a_generation()
