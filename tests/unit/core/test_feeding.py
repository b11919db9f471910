"""Whom a world waits for where hosts feed others."""

from __future__ import annotations

import pytest

from keepstep.core import elastic
from keepstep.core.events import LeaseLost
from keepstep.core.facts import Lease, Server
from keepstep.core.membership import on_lease_lost
from keepstep.core.records import CordonRecord, NodeRecord, Phase
from keepstep.core.state import Turn
from keepstep.core.view import Cluster, Seen, with_generation
from tests.unit.core.values import a_generation, a_turn

HOSTS, FEEDERS, IDLE = ("algo-1", "algo-2", "algo-3", "algo-4", "algo-5"), ("algo-3", "algo-4"), ("algo-5",)


def turn_of(*there: str, cordoned: tuple[str, ...] = (), absent_s: float = 0.0, phase: Phase | None = None) -> Turn:
    """What a leader sees; whoever is not there has been away for so long."""
    turn = a_turn(hosts=HOSTS, feeders=FEEDERS, idle=IDLE)
    nodes = {host: Seen(NodeRecord(host, host, "10.0.0.1", 1), 1) for host in there}
    cordons = {host: Seen(CordonRecord(host, "operator", 0.0), 1) for host in cordoned}
    turn.set(cluster=Cluster(synced=True, whole=True, nodes=nodes, cordons=cordons))
    if phase is not None:
        turn.set(cluster=with_generation(turn.state.cluster, Seen(a_generation(phase=phase), 2)))
    turn.set(absent={host: turn.now - absent_s for host in HOSTS if host not in there})
    return turn


@pytest.mark.parametrize(
    ("there", "cordoned", "absent_s", "gathered"),
    [
        (("algo-1", "algo-2", "algo-3", "algo-4"), (), 0.0, True),
        (("algo-1", "algo-2", "algo-3"), (), 0.0, False),
        (("algo-1", "algo-2", "algo-3"), (), 1e6, True),
        (("algo-1", "algo-2"), (), 1e6, False),
        (("algo-1", "algo-3", "algo-4"), (), 1e6, False),
        (("algo-1", "algo-2", "algo-3"), ("algo-4",), 0.0, True),
        (("algo-1", "algo-2", "algo-3", "algo-4"), ("algo-3", "algo-4"), 1e6, False),
    ],
)
def test_a_world_begins_with_its_feeders_or_with_some_of_them_after_a_while(
    there: tuple[str, ...], cordoned: tuple[str, ...], absent_s: float, gathered: bool
) -> None:
    assert elastic.gathered(turn_of(*there, cordoned=cordoned, absent_s=absent_s)) is gathered


def test_a_cordoned_host_feeds_nobody() -> None:
    turn = turn_of("algo-1", "algo-2", "algo-3", "algo-4", cordoned=("algo-3",))
    assert [member.host for member in elastic.feeders(turn)] == ["algo-4"]
    assert [member.host for member in elastic.chosen(turn, ())] == ["algo-1", "algo-2"]


def test_who_trains_is_not_ended_because_nobody_feeds_any_more() -> None:
    assert elastic.enough(turn_of("algo-1", "algo-2", phase=Phase.READY))
    assert not elastic.enough(turn_of("algo-1", "algo-2", phase=Phase.FORMING))


def test_a_feeder_that_loses_its_lease_has_failed_at_nothing() -> None:
    turn = turn_of("algo-1")
    turn.set(lease=Lease(7, turn.now + 5.0), servers=(Server("one.s0", 3, -1, "feeder", 0),))
    on_lease_lost(turn, LeaseLost(7))
    assert turn.state.lease is None
    assert turn.state.failure is None
