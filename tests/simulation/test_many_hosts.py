"""A sample of the campaign: jobs of 3 to 100 hosts under random policies, and what its checkers are worth."""

from __future__ import annotations

import pytest

from keepstep.core import elastic, generations
from keepstep.core.policy import Policy
from keepstep.core.records import Phase
from keepstep.simulation.clockwork import Clockwork
from keepstep.simulation.etcd import FakeEtcd, Network
from keepstep.simulation.many import ManyWorld, run_many
from tests.simulation.seeds import patient, play_many

SEEDS, AT_ONCE = 60, 15
ENOUGH = range(150)


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_seed_breaks_a_rule(first):
    bad = [(seed, found) for seed in range(first, first + AT_ONCE) if (found := play_many((seed, 0)).violations)]
    assert bad == []


@pytest.mark.parametrize("hosts", [3, 12, 24])
def test_a_job_to_which_nothing_happens_is_done_and_restarts_nothing(hosts):
    world = ManyWorld(1, Policy(), hosts, 12)
    world.silent = False
    world.play(())
    assert world.checkers.violations + world.at_the_end() == []
    assert {host.exit_code for host in world.hosts.values()} == {0}
    end = world.coordinator.history[-1]
    assert (end.phase, end.number, end.restarts, len(end.members)) == (Phase.ENDED, 1, 0, hosts)


def test_a_world_of_too_few_is_caught(monkeypatch):
    monkeypatch.setattr(generations.elastic, "gathered", lambda turn: True)
    assert any("at least" in text for seed in ENOUGH for text in run_many(seed, patient(), 3).violations)


def test_giving_up_without_need_is_caught(monkeypatch):
    monkeypatch.setattr(elastic, "enough", lambda turn: False)
    assert any("gives up although" in text for seed in ENOUGH for text in run_many(seed, patient(), 3).violations)


def etcd_of(hosts):
    network, away = Network(), set()
    names = tuple(f"algo-{n}" for n in range(1, hosts + 1))
    return FakeEtcd(Clockwork(), network, names, lambda host: host not in away), away


@pytest.mark.parametrize(("hosts", "members", "bearable"), [(3, 3, 1), (64, 5, 2)])
def test_a_minority_of_members_is_not_missed_and_a_majority_is(hosts, members, bearable):
    etcd, away = etcd_of(hosts)
    assert len(etcd.members) == members
    for lost in etcd.first[:bearable]:
        away.add(lost)
        etcd.lose_data(lost)
    assert etcd.hears("algo-3", etcd.members) and etcd.incarnation == 0
    away.add(etcd.first[bearable])
    etcd.lose_data(etcd.first[bearable])
    assert not etcd.hears("algo-3", etcd.members)
    away.clear()
    etcd.changed()
    assert etcd.hears("algo-3", etcd.members) and etcd.incarnation == 1


def test_only_the_side_of_the_majority_is_answered():
    etcd, _ = etcd_of(4)
    etcd.network.part = {"algo-1": 1, "algo-4": 1}
    etcd.changed()
    assert [name for name in ("algo-1", "algo-2", "algo-3", "algo-4") if etcd.reaches(name, etcd.first)] == [
        "algo-2", "algo-3",
    ]  # fmt: skip


def test_a_line_that_is_cut_one_way_loses_answers_alone():
    etcd, _ = etcd_of(4)
    etcd.network.cuts = {(member, "algo-4") for member in etcd.first}
    etcd.changed()
    assert etcd.hears("algo-4", etcd.first)
    assert not etcd.answers("algo-4", etcd.first)
