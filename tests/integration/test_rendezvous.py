"""What `make bench-rendezvous` measures on keepstep's side comes about, with as few hosts as can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import rendezvous
from tests.support.etcd import EtcdCluster

pytestmark = pytest.mark.integration


@pytest.fixture
def etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdCluster]:
    monkeypatch.setattr(rendezvous, "SETTLES_S", 0.0)
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


def test_two_hosts_start_once_both_have_come(etcd: EtcdCluster):
    assert rendezvous.keepstep_start(etcd.endpoints, "job", 2) > 0


def test_a_lost_host_s_place_is_taken_in_a_generation_that_becomes_ready(etcd: EtcdCluster):
    assert rendezvous.keepstep_ready(etcd.endpoints, "job", 2) > 0
