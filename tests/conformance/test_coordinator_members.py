"""What a coordinator promises while members of its etcd are lost, come back and are replaced: real processes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from contextlib import aclosing, asynccontextmanager, contextmanager

import pytest

from keepstep.adapters.etcd import Endpoints, EtcdCoordinator, EtcdMembers
from keepstep.ports import CoordinatorRefused, CoordinatorUnavailable
from tests.support.etcd import EtcdCluster, EtcdServer

P = "/keepstep/job/"
PATIENCE_S = 15.0
"""For an answer: a busy machine may stand still for some seconds."""


@pytest.fixture
def three(tmp_path):
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


@asynccontextmanager
async def connected(endpoints):
    coordinator = EtcdCoordinator(endpoints, timeout_s=PATIENCE_S, idle_s=1.0)
    try:
        yield coordinator
    finally:
        await coordinator.close()


async def until_done(ask):
    """Repeat until it is done; the caller's deadline bounds it."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except (CoordinatorUnavailable, CoordinatorRefused):
                await asyncio.sleep(0.05)


async def that_has_served(members, name: str):
    """A member, once those who are asked know that it has served: they may hear of it later than it says so."""
    async with asyncio.timeout(60):
        while True:
            found = {member.name: member for member in await until_done(members.found)}
            if found[name].has_started:
                return found[name]
            await asyncio.sleep(0.05)


async def who_leads(each) -> tuple[list[int], int]:
    """All members' numbers, and the one that all of them follow: they may be choosing another one just now."""
    async with asyncio.timeout(60):
        while True:
            standings = [await until_done(members.standing) for members in each]
            leaders = {leader for _, leader in standings}
            if len(leaders) == 1 and 0 not in leaders:
                return [number for number, _ in standings], leaders.pop()
            await asyncio.sleep(0.05)


@contextmanager
def replacement(three: EtcdCluster, folder):
    """A member to take the place of the third one, started by the test."""
    member = EtcdServer(folder, "algo-4")
    member.token, member.joins = three.members[0].token, True
    member.others = tuple((each.name, each.spec.peer_url) for each in three.members[:2])
    try:
        yield member
    finally:
        member.kill()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_loss_of_one_member_of_three_loses_neither_key_nor_lease_nor_event(three, lost):
    async def scenario():
        async with connected(three.endpoints) as c:
            lease = await c.grant(60)
            await c.put(P + "a", "1", lease=lease)
            revision, _ = await c.read(P)
            async with aclosing(c.watch(P, revision)) as watch:
                three.members[lost].kill()
                await until_done(lambda: c.keep_alive(lease))
                await until_done(lambda: c.put(P + "b", "2"))
                seen = await asyncio.wait_for(anext(watch), 30)
                assert {event.key for event in seen} == {P + "b"}  # put again where the first answer was lost
            _, found = await until_done(lambda: c.read(P))
            assert [(kv.key, kv.value) for kv in found] == [(P + "a", "1"), (P + "b", "2")]

    asyncio.run(scenario())


def test_without_a_majority_nothing_is_answered_and_with_it_everything_is_there(three):
    async def scenario():
        async with connected(three.endpoints) as c:
            await c.put(P + "a", "1")
            three.members[0].kill()
            three.members[1].kill()
            with pytest.raises(CoordinatorUnavailable):
                await c.put(P + "b", "2", expect=0)
            three.members[0].start(wait=False)
            _, found = await until_done(lambda: c.read(P))
            assert (P + "a", "1") in [(kv.key, kv.value) for kv in found]

    asyncio.run(scenario())


def test_a_lost_member_is_replaced_and_the_new_one_keeps_what_the_old_one_did(three, tmp_path):
    async def scenario():
        first, second, lost = three.members
        async with connected(three.endpoints) as c:
            await c.put(P + "a", "1")
            lost.kill()
            members = EtcdMembers(Endpoints([first.endpoint, second.endpoint]), PATIENCE_S)
            gone = await that_has_served(members, lost.name)
            await until_done(lambda: members.remove(gone.member_id))
            (tmp_path / "new").mkdir()
            with replacement(three, tmp_path / "new") as new:
                await until_done(lambda: members.add(new.spec.peer_url))
                new.start()
                c.use([first.endpoint, new.endpoint])
                second.kill()  # a majority of the three is left only if the new one is a member of its own right
                assert (await until_done(lambda: c.read(P)))[1][0].value == "1"
                assert await until_done(lambda: c.put(P + "b", "2")) is not None
            await members.close()

    asyncio.run(scenario())


def test_a_member_that_lost_its_data_is_known_to_the_others_as_one_that_has_served(three):
    async def scenario():
        lost = three.members[2]
        lost.kill()
        shutil.rmtree(lost.folder / "data")
        members = EtcdMembers(Endpoints(three.endpoints[:2]), PATIENCE_S)
        assert {member.name for member in await until_done(members.found)} == {"algo-1", "algo-2", "algo-3"}
        assert (await that_has_served(members, "algo-3")).peer_urls == (lost.spec.peer_url,)
        await members.close()

    asyncio.run(scenario())


def test_the_member_that_is_named_leads(three):
    async def scenario():
        each = [EtcdMembers(Endpoints([endpoint]), PATIENCE_S) for endpoint in three.endpoints]
        numbers, leader = await who_leads(each)
        heir = next(number for number in numbers if number != leader)
        with pytest.raises(CoordinatorRefused):
            await each[numbers.index(leader)].hand_over(1)  # nobody's
        async with asyncio.timeout(60):
            while leader != heir:  # where it stood still for a moment, it leads no more, and is not who can be asked
                with contextlib.suppress(CoordinatorUnavailable, CoordinatorRefused):
                    await each[numbers.index(leader)].hand_over(heir)
                _, leader = await who_leads(each)
        for members in each:
            await members.close()

    asyncio.run(scenario())


def test_a_member_that_is_let_go_twice_is_a_request_that_is_refused(three):
    """The first answer may have been lost."""

    async def scenario():
        members = EtcdMembers(Endpoints(three.endpoints[:2]), PATIENCE_S)
        three.members[2].kill()
        (gone,) = [member for member in await until_done(members.found) if member.name == "algo-3"]
        await until_done(lambda: members.remove(gone.member_id))
        with pytest.raises(CoordinatorRefused, match="not found"):
            await members.remove(gone.member_id)
        await members.close()

    asyncio.run(scenario())
