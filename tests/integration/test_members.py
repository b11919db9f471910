"""How a host comes to keep etcd in a lost one's place, whatever befalls its member or its agent meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.adapters.etcd import Endpoints, EtcdCoordinator, EtcdMembers
from keepstep.adapters.etcd_member import noted_data_dir
from keepstep.app import members as app
from keepstep.app.members import Members, Site
from keepstep.ports import CoordinatorRefused, CoordinatorUnavailable
from tests.support.etcd import EtcdCluster, EtcdServer
from tests.unit.core.values import a_job

pytestmark = pytest.mark.integration

HOSTS = ("algo-1", "algo-2", "algo-3")
NEWCOMER, LOST = "algo-4", "algo-3"
SERVING = ("algo-1", "algo-2", NEWCOMER)
PATIENCE_S = 15.0
"""For an answer: a busy machine may stand still for some seconds."""


class Init:
    """Starts companions as init does: what runs already is left running."""

    def __init__(self) -> None:
        self.started = 0
        self.process: subprocess.Popen[bytes] | None = None

    async def companion(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: str) -> int:
        if self.process is None or self.process.poll() is not None:
            self.started += 1
            with Path(log).open("ab") as file:
                self.process = subprocess.Popen(argv, env=dict(env), stdout=file, stderr=file)
        return self.process.pid

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Of which the third is to be lost; each host's members listen on two ports that follow each other."""
    cluster = EtcdCluster(tmp_path)
    for member in cluster.members:
        in_a_row(member)
    for member in cluster.members:
        member.others = tuple((each.name, each.spec.peer_url) for each in cluster.members if each is not member)
    with cluster:
        yield cluster


@pytest.fixture
def lost(three: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> EtcdCluster:
    """The third member is gone, and its connections with it: nothing that was sent to it waits for room."""
    monkeypatch.setattr(app, "_WRITES_END_S", 0.0)
    three.members[2].kill()
    return three


@pytest.fixture
def init() -> Iterator[Init]:
    made = Init()
    yield made
    made.kill()


def in_a_row(server: EtcdServer) -> EtcdServer:
    while server.peer_port != server.port + 1:
        fresh = EtcdServer(server.folder)
        server.port, server.peer_port = fresh.port, fresh.peer_port
    return server


Make = Callable[[int], Members]


@pytest.fixture
def agent(three: EtcdCluster, init: Init, tmp_path: Path) -> Make:
    """A new agent's part on the host that is to join: the `boot`-th one there."""
    places = {member.name: ("127.0.0.1", member.port) for member in three.members}
    places[NEWCOMER] = ("127.0.0.1", in_a_row(EtcdServer(tmp_path)).port)
    job = a_job(host=NEWCOMER, hosts=(*HOSTS, NEWCOMER))
    site = Site(job, 0, places, tmp_path / "scratch", None, token=three.members[0].token)

    def make(boot: int) -> Members:
        known = replace(site, job=replace(job, etcd_hosts=HOSTS, boot=boot))
        coordinator = EtcdCoordinator(known.urls(HOSTS))
        return Members(known, coordinator, init, print)  # type: ignore[arg-type]

    return make


async def names(three: EtcdCluster) -> set[str]:
    members = EtcdMembers(Endpoints(three.endpoints[:2]), PATIENCE_S)
    try:
        return {member.name for member in await members.found()}
    finally:
        await members.close()


def test_a_member_counts_once_it_serves(lost, agent, init):
    async def scenario():
        part = agent(0)
        await part.start()
        assert init.started == 0  # it is none of the first hosts
        assert await part.join(LOST, SERVING) == ""
        assert await names(lost) == set(SERVING)
        lost.members[1].kill()  # a majority is left only if the new one serves
        assert await part.join(LOST, SERVING) == ""

    asyncio.run(scenario())


def test_an_agent_that_is_started_again_goes_on_where_the_last_one_was(lost, agent, init):
    async def scenario():
        first = agent(0)
        await first.start()
        assert await first.join(LOST, SERVING) == ""
        second = agent(1)
        await second.start()
        assert await second.join(LOST, SERVING) == ""
        assert await names(lost) == set(SERVING)
        assert init.started == 1

    asyncio.run(scenario())


def test_a_member_that_stays_away_joins_anew(lost, agent, init, tmp_path, monkeypatch):
    async def scenario():
        part = agent(0)
        await part.start()
        assert await part.join(LOST, SERVING) == ""
        init.kill()
        shutil.rmtree(noted_data_dir(tmp_path / "scratch"))
        monkeypatch.setattr(app, "_DEATHS_MAX", 0)
        part.exited(1)
        assert await part.join(LOST, SERVING) == ""
        assert await names(lost) == set(SERVING)
        assert init.started == 2

    asyncio.run(scenario())


def test_etcd_answers_while_a_host_that_vanished_is_replaced(three, agent, init):
    """The leader has more to send to it than there is room for."""

    async def scenario():
        part = agent(0)
        await part.start()
        while (leader := await one_that_leads(three)) is three.members[2]:
            await hand_over(three)
        client = EtcdCoordinator([leader.endpoint], timeout_s=10.0)
        before = leader.log_path.read_text()
        os.kill(three.members[2].pid, signal.SIGSTOP)
        while not misses(leader, before):  # until then etcd does not let it go
            await client.put("/keepstep/small", "1")
            await asyncio.sleep(0.05)
        for _ in range(40):
            await client.put("/keepstep/large", "1" * 200_000)
        joining = asyncio.create_task(part.join(LOST, SERVING))
        while not joining.done():
            await client.put("/keepstep/small", "1")  # raises where it is not answered
            await asyncio.sleep(0.05)
        assert await joining == ""
        assert await names(three) == set(SERVING)
        await client.close()

    asyncio.run(scenario())


async def one_that_leads(three: EtcdCluster) -> EtcdServer:
    while True:  # on a busy machine they may be choosing another one just now
        for member in three.members:
            asked = EtcdMembers(Endpoints([member.endpoint]), PATIENCE_S)
            number, leader = await asked.standing()
            await asked.close()
            if number == leader:
                return member
        await asyncio.sleep(0.05)


async def hand_over(three: EtcdCluster) -> None:
    """Have the first member lead in place of the third, if that leads still."""
    first, third = (EtcdMembers(Endpoints([three.members[index].endpoint]), PATIENCE_S) for index in (0, 2))
    with contextlib.suppress(CoordinatorRefused, CoordinatorUnavailable):
        await third.hand_over((await first.standing())[0])
    await first.close()
    await third.close()


def misses(member: EtcdServer, before: str) -> bool:
    """Whether it has lost what another member told it, since its log was so."""
    told = member.log_path.read_text().removeprefix(before).splitlines()
    return any("lost TCP streaming" in line and "stream Message" in line for line in told)
