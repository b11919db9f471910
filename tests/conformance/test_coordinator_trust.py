"""Nobody is let in without a certificate of this job's authority; members know each other by it through losses."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
import urllib3

from keepstep.adapters.certificates import make_authority, tls_files
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.ports import CoordinatorRefused, CoordinatorUnavailable
from tests.support.etcd import EtcdCluster, EtcdServer, make_tls

P = "/keepstep/job/"
PATIENCE_S = 15.0
"""For an answer: a busy machine may stand still for some seconds."""


@pytest.fixture(scope="module")
def authority():
    return make_authority("job", time.time())


@pytest.fixture(scope="module")
def server(tmp_path_factory, authority):
    folder = tmp_path_factory.mktemp("etcd")
    with EtcdServer(folder, tls=make_tls(folder / "tls", authority)) as server:
        yield server


def ask(endpoint, tls):
    """Read through a coordinator with these files; return how often a certificate was not believed."""

    async def scenario():
        coordinator = EtcdCoordinator([endpoint], tls=tls, timeout_s=PATIENCE_S)
        try:
            await coordinator.read(P)
        finally:
            distrusted.append(coordinator.distrusted)
            await coordinator.close()

    distrusted = []
    try:
        asyncio.run(scenario())
    except CoordinatorUnavailable:
        return distrusted[0]
    return None


def test_a_node_of_this_job_is_let_in(server, authority, tmp_path):
    assert ask(server.endpoint, make_tls(tmp_path / "node", authority)) is None


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_who_has_no_certificate_is_refused(scheme, server):
    with urllib3.PoolManager(ca_certs=str(server.tls.ca), retries=False, timeout=5) as pool:
        try:
            answer = pool.request("GET", f"{scheme}://127.0.0.1:{server.port}/health")
        except urllib3.exceptions.HTTPError:
            return
        assert answer.status != 200 and answer.data == b"Client sent an HTTP request to an HTTPS server.\n"


@pytest.mark.parametrize("whose", ["foreign", "expired"])
def test_who_has_a_foreign_or_an_expired_certificate_is_refused(whose, server, authority, tmp_path):
    if whose == "expired":
        tls = make_tls(tmp_path / "node", authority, days=-1)
    else:
        tls = make_tls(tmp_path / "node")
        tls.ca.write_bytes(authority.certificate)  # it believes the server, and is not believed
    assert ask(server.endpoint, tls)


def test_a_server_of_another_authority_is_not_believed(server, tmp_path):
    assert ask(server.endpoint, make_tls(tmp_path / "node"))


def test_whoever_gets_the_right_files_is_let_in_from_then_on(server, authority, tmp_path):
    async def scenario():
        folder = tmp_path / "node"
        make_tls(folder)
        coordinator = EtcdCoordinator([server.endpoint], tls=tls_files(folder), timeout_s=PATIENCE_S)
        try:
            with pytest.raises(CoordinatorUnavailable):
                await coordinator.read(P)
            make_tls(folder, authority)
            coordinator.renew()
            await coordinator.read(P)
        finally:
            await coordinator.close()

    asyncio.run(scenario())


def test_a_lease_and_a_watch_survive_the_loss_of_the_member_that_was_asked(authority, tmp_path):
    async def scenario(cluster):
        tls = cluster.members[0].tls
        coordinator = EtcdCoordinator(cluster.endpoints, tls=tls, timeout_s=PATIENCE_S, idle_s=1.0)
        try:
            lease = await coordinator.grant(60)
            await coordinator.put(P + "a", "1", lease=lease)
            revision, _ = await coordinator.read(P)
            async with aclosing(coordinator.watch(P, revision)) as watch, asyncio.timeout(60):
                cluster.members[0].kill()
                while True:
                    try:
                        assert await coordinator.keep_alive(lease) > 0
                        assert await coordinator.put(P + "b", "2") is not None
                        break
                    except (CoordinatorUnavailable, CoordinatorRefused):
                        await asyncio.sleep(0.05)
                # put again where the first answer was lost
                assert {event.key for event in await anext(watch)} == {P + "b"}
            assert {kv.key for kv in (await coordinator.read(P))[1]} == {P + "a", P + "b"}
        finally:
            await coordinator.close()

    with EtcdCluster(tmp_path, tls=make_tls(tmp_path / "tls", authority)) as cluster:
        asyncio.run(scenario(cluster))
