"""What a coordinator promises while the network or etcd itself fails: a real etcd behind a proxy that can be cut."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import aclosing, asynccontextmanager

import pytest

from keepstep.adapters.coordinator_memory import MemoryCoordinator
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.ports import CoordinatorUnavailable, KeyEvent, LeaseGone, WatchLost
from tests.support.etcd import EtcdServer
from tests.support.ports import free_port
from tests.support.proxy import TcpProxy

P = "/keepstep/job/"
TIMEOUT_S, HASTY_S = 8.0, 1.0
"""For an answer: a busy machine may stand still for some seconds. And where none is to come."""


@pytest.fixture
def etcd(tmp_path):
    with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture
def proxy(etcd):
    with TcpProxy("127.0.0.1", etcd.port) as between:
        yield between


@asynccontextmanager
async def connected(*endpoints: str, timeout_s: float = TIMEOUT_S, idle_s: float = 1.0):
    coordinator = EtcdCoordinator(endpoints, timeout_s=timeout_s, idle_s=idle_s)
    try:
        yield coordinator
    finally:
        await coordinator.close()


async def events_of(watch, count: int) -> list[KeyEvent]:
    events = []
    while len(events) < count:
        events += await asyncio.wait_for(anext(watch), 30)
    assert len(events) == count, events
    return events


async def until_answered(ask):
    """Repeat until there is an answer; the caller's deadline bounds it."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except CoordinatorUnavailable:
                await asyncio.sleep(0.02)


def run(scenario):
    async def bounded():
        await asyncio.wait_for(scenario, 100)

    asyncio.run(bounded())


@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_without_an_answer_every_request_fails_in_time_and_works_again_afterwards(proxy, how):
    async def scenario():
        async with connected(proxy.endpoint, timeout_s=HASTY_S) as c:
            lease = await until_answered(lambda: c.grant(60))
            await until_answered(lambda: c.put(P + "a", "1"))
            getattr(proxy, how)()
            for ask in (
                lambda: c.read(P),
                lambda: c.put(P + "a", "2"),
                lambda: c.delete(P + "a"),
                lambda: c.grant(5),
                lambda: c.keep_alive(lease),
                lambda: c.revoke(lease),
            ):
                with pytest.raises(CoordinatorUnavailable):
                    # The adapter's own timeout must come first: the outer one raises TimeoutError and fails the test.
                    await asyncio.wait_for(ask(), HASTY_S + 15)
            proxy.restore()
            revision, _ = await until_answered(lambda: c.read(P))
            assert await until_answered(lambda: c.put(P + "b", "3")) > revision
            again = await until_answered(lambda: c.grant(60))
            assert await until_answered(lambda: c.keep_alive(again)) >= 60

    run(scenario())


def test_closing_does_not_wait_for_a_frozen_etcd(proxy):
    async def scenario():
        async with connected(proxy.endpoint, timeout_s=HASTY_S) as c:
            revision, _ = await until_answered(lambda: c.read(P))
            watch = c.watch(P, revision)
            proxy.freeze()
            asking = [asyncio.ensure_future(c.read(P)) for _ in range(12)]
            await asyncio.sleep(0)
            await asyncio.wait_for(c.close(), 30)
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(answer, CoordinatorUnavailable)
            with pytest.raises(StopAsyncIteration):
                await anext(watch)

    run(scenario())


@pytest.mark.parametrize("dead", ["refuses", "is silent"])
def test_another_endpoint_answers_where_one_does_not(etcd, proxy, dead):
    async def scenario():
        proxy.freeze()
        first = proxy.endpoint if dead == "is silent" else f"http://127.0.0.1:{free_port()}"
        async with connected(first, etcd.endpoint) as c:
            revision, _ = await c.read(P)
            lease = await c.grant(60)
            await c.put(P + "a", "1", lease=lease, expect=0)
            assert await c.keep_alive(lease) >= 60
            async with aclosing(c.watch(P, revision)) as watch:
                assert [event.value for event in await events_of(watch, 1)] == ["1"]

    run(scenario())


def test_a_renewal_does_not_wait_behind_bulk(proxy):
    async def scenario():
        c = EtcdCoordinator([proxy.endpoint], timeout_s=8)
        try:
            while proxy.accepted < 3:  # each thread that asks for bulk has a connection that can be stranded
                await asyncio.gather(*(c.read(P) for _ in range(12)))
            proxy.strand()
            lease = await c.grant(60)
            bulk = [asyncio.ensure_future(c.read(P)) for _ in range(12)]
            await asyncio.sleep(0)
            assert await c.keep_alive(lease) >= 60
            assert not any(task.done() for task in bulk)
            for task in bulk:
                task.cancel()
        finally:
            await c.close()

    run(scenario())


@pytest.mark.parametrize("how", ["cut", "strand"])
def test_a_watch_goes_on_after_a_broken_connection_without_gap_or_repetition(etcd, proxy, how):
    async def scenario():
        async with connected(etcd.endpoint) as writer, connected(proxy.endpoint, idle_s=0.5) as c:
            revision, _ = await c.read(P)
            async with aclosing(c.watch(P, revision)) as watch:
                wanted = []
                for turn in range(3):
                    for part in ("before", "during", "after"):
                        if part == "during":
                            getattr(proxy, how)()
                        if part == "after":
                            proxy.restore()
                        for key in ("x", "y"):
                            wanted.append((f"{P}{key}", f"{turn} {part}"))
                            await writer.put(*wanted[-1])
                        if part == "before":
                            got = await events_of(watch, 2)
                            assert [(event.key, event.value) for event in got] == wanted[-2:]
                    got = await events_of(watch, 4)
                    assert [(event.key, event.value) for event in got] == wanted[-4:]
            assert proxy.accepted >= 4

    run(scenario())


def test_a_watch_holds_what_nobody_takes_yet(etcd):
    async def scenario():
        async with connected(etcd.endpoint) as c:
            revision, _ = await c.read(P)
            async with aclosing(c.watch(P, revision)) as watch:
                for turn in range(300):
                    await c.put(P + "a", str(turn))
                assert [event.value for event in await events_of(watch, 300)] == [str(turn) for turn in range(300)]

    run(scenario())


def test_a_restart_that_keeps_the_data_loses_nothing(etcd):
    async def scenario():
        async with connected(etcd.endpoint) as c:
            lease = await c.grant(60)
            revision, _ = await c.read(P)
            async with aclosing(c.watch(P, revision)) as watch:
                await c.put(P + "a", "1", lease=lease)
                await events_of(watch, 1)
                await asyncio.to_thread(etcd.restart, empty=False)
                await until_answered(lambda: c.put(P + "a", "2", lease=lease))
                assert [event.value for event in await events_of(watch, 1)] == ["2"]
            assert await c.keep_alive(lease) >= 60

    run(scenario())


@pytest.mark.parametrize("same_token", [True, False])
def test_an_etcd_that_came_back_empty_is_another_one(etcd, same_token):
    async def scenario():
        async with connected(etcd.endpoint) as c:
            lease = await c.grant(60)
            revision, _ = await c.read(P)
            leader = await c.put(P + "leader", "me", lease=lease)
            async with aclosing(c.watch(P, revision)) as watch:
                await events_of(watch, 1)
                await asyncio.to_thread(etcd.restart, empty=True, same_token=same_token)
                with pytest.raises(WatchLost):
                    await asyncio.wait_for(anext(watch), 30)
            with pytest.raises(LeaseGone):
                await until_answered(lambda: c.keep_alive(lease))
            assert await c.put(P + "g", "1", guard=(P + "leader", leader)) is None
            _, found = await c.read(P)
            assert found == []
            assert await c.put(P + "g", "1", expect=0, guard=(P + "leader", 0))

    run(scenario())


def test_an_empty_etcd_is_recognised_even_where_its_revisions_have_caught_up(etcd, proxy):
    """The comparison below would hold by accident, and the watch could go on with a hole, but for the marker."""

    async def scenario():
        async with connected(proxy.endpoint) as c:
            revision, _ = await c.read(P)
            leader = await c.put(P + "leader", "old")
            async with aclosing(c.watch(P, revision)) as watch:
                await events_of(watch, 1)
                proxy.cut()
                await asyncio.to_thread(etcd.restart, empty=True, same_token=True)
                async with connected(etcd.endpoint) as other:
                    await other.read(P)
                    assert await other.put(P + "leader", "new") == leader
                    for turn in range(50):
                        await other.put(P + "a", str(turn))
                    proxy.restore()
                    assert await until_answered(lambda: c.put(P + "g", "stale", guard=(P + "leader", leader))) is None
                    assert [kv.key for kv in (await other.read(P))[1]] == [P + "a", P + "leader"]
                with pytest.raises(WatchLost):
                    await asyncio.wait_for(anext(watch), 30)

    run(scenario())


def test_a_compacted_history_is_told(etcd):
    async def scenario():
        async with connected(etcd.endpoint) as c:
            first = await c.put(P + "a", "0")
            for turn in range(5):
                last = await c.put(P + "a", str(turn))
            body = json.dumps({"revision": last, "physical": True}).encode()
            request = urllib.request.Request(etcd.endpoint + "/v3/kv/compaction", body)
            with await asyncio.to_thread(urllib.request.urlopen, request, timeout=30) as answer:
                assert answer.status == 200
            async with aclosing(c.watch(P, first)) as watch:
                with pytest.raises(WatchLost, match="compacted"):
                    await asyncio.wait_for(anext(watch), 30)
            async with aclosing(c.watch(P, last)) as watch:
                await c.put(P + "a", "on")
                assert [event.value for event in await events_of(watch, 1)] == ["on"]

    run(scenario())


def test_a_forgotten_history_is_told_in_memory_too():
    async def scenario():
        c = MemoryCoordinator(lambda: 0.0, history_max=3)
        first = await c.put(P + "a", "0")
        for turn in range(3):
            last = await c.put(P + "a", str(turn))
        async with aclosing(c.watch(P, first)) as watch:
            assert len(await events_of(watch, 3)) == 3
        await c.put(P + "a", "one more")
        with pytest.raises(WatchLost):
            await anext(c.watch(P, first))
        async with aclosing(c.watch(P, last)) as watch:
            assert [event.value for event in await events_of(watch, 1)] == ["one more"]
        await c.close()

    run(scenario())
