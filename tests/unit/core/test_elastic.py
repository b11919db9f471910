"""Whom keepstep itself may cordon: no more than the policy's share of the hosts, and enough have to be left."""

from __future__ import annotations

import pytest

from keepstep.core import elastic
from keepstep.core.policy import Policy
from keepstep.core.records import CordonRecord, NodeRecord
from keepstep.core.state import Turn
from keepstep.core.view import Cluster, Seen
from tests.unit.core.values import a_turn


def turn_of(hosts: int, cordoned: int, *, percent: int = 10, least: int = 2) -> Turn:
    """All of so many hosts are there, of which the last ones are cordoned."""
    names = tuple(f"algo-{number}" for number in range(1, hosts + 1))
    policy = Policy.model_validate({"health": {"cordon_max": percent}, "elastic": {"hosts": {"min": least}}})
    turn = a_turn(policy, hosts=names)
    out = names[hosts - cordoned :]
    turn.set(
        cluster=Cluster(
            synced=True,
            whole=True,
            nodes={host: Seen(NodeRecord(host, host, "10.0.0.1", 1), 1) for host in names},
            cordons={host: Seen(CordonRecord(host, "straggler", 0.0), 1) for host in out},
        )
    )
    return turn


@pytest.mark.parametrize(
    ("hosts", "percent", "most"), [(30, 10, 3), (39, 10, 3), (40, 10, 4), (4, 10, 1), (4, 0, 1), (30, 100, 28)]
)
def test_not_more_than_the_policys_share_of_the_hosts_and_always_one(hosts, percent, most):
    assert elastic.may_do_without(turn_of(hosts, most - 1, percent=percent), "algo-1")
    assert not elastic.may_do_without(turn_of(hosts, most, percent=percent), "algo-1")


def test_not_where_too_few_would_be_left():
    assert elastic.may_do_without(turn_of(4, 1, percent=100, least=2), "algo-1")
    assert not elastic.may_do_without(turn_of(4, 1, percent=100, least=3), "algo-1")


def test_a_host_that_is_out_is_not_put_out_again():
    assert not elastic.may_do_without(turn_of(30, 1), "algo-30")
