"""What every coordinator promises, on the one in memory, a real etcd, and three members without TLS and with it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from keepstep.adapters.coordinator_memory import MemoryCoordinator
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.ports import CoordinatorRefused, KeyEvent, KeyValue, LeaseGone, WatchLost
from tests.support.etcd import EtcdCluster, EtcdServer, make_tls

P = "/keepstep/job/"
PATIENCE_S = 15.0
"""For an answer: a busy machine may stand still for some seconds."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trusted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("etcd")
    with EtcdCluster(folder, tls=make_tls(folder / "tls")) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd", "three members", "three members with TLS"])
def check(request):
    """Run a coroutine function with a coordinator whose keys are empty, and close it afterwards."""

    def run(scenario):
        async def whole():
            if request.param == "memory":
                coordinator = MemoryCoordinator(time.monotonic)
            elif request.param == "three members with TLS":
                cluster = request.getfixturevalue("trusted")
                coordinator = EtcdCoordinator(cluster.endpoints, tls=cluster.members[0].tls, timeout_s=PATIENCE_S)
            elif request.param == "three members":
                coordinator = EtcdCoordinator(request.getfixturevalue("three").endpoints, timeout_s=PATIENCE_S)
            else:
                coordinator = EtcdCoordinator([request.getfixturevalue("etcd").endpoint], timeout_s=PATIENCE_S)
            try:
                await coordinator.delete("/keepstep/job", prefix=True)
                await asyncio.wait_for(scenario(coordinator), 60)
            finally:
                await coordinator.close()

        asyncio.run(whole())

    return run


async def take(watch, count: int) -> list[KeyEvent]:
    """Return the next `count` events, and fail where more come with them than belong to them."""
    events = []
    while len(events) < count:
        events += await asyncio.wait_for(anext(watch), 30)
    assert len(events) == count, events
    return events


def test_put_returns_growing_revisions_and_read_shows_them(check):
    async def scenario(c):
        first = await c.put(P + "a", "1")
        second = await c.put(P + "b", "2")
        again = await c.put(P + "a", "3")
        assert first < second < again
        revision, found = await c.read(P)
        assert revision >= again
        assert found == [KeyValue(P + "a", "3", again, 0), KeyValue(P + "b", "2", second, 0)]

    check(scenario)


def test_put_when_absent(check):
    async def scenario(c):
        assert await c.put(P + "a", "1", expect=0)
        assert await c.put(P + "a", "2", expect=0) is None
        assert [kv.value for kv in (await c.read(P))[1]] == ["1"]

    check(scenario)


def test_put_at_a_revision(check):
    async def scenario(c):
        first = await c.put(P + "a", "1")
        assert await c.put(P + "a", "2", expect=first + 1) is None
        second = await c.put(P + "a", "2", expect=first)
        assert second is not None
        assert await c.put(P + "a", "3", expect=first) is None
        assert await c.put(P + "absent", "x", expect=first) is None
        assert [(kv.key, kv.value) for kv in (await c.read(P))[1]] == [(P + "a", "2")]

    check(scenario)


def test_put_under_a_guard(check):
    async def scenario(c):
        leader = await c.put(P + "leader", "me")
        assert await c.put(P + "g", "1", expect=0, guard=(P + "leader", leader))
        assert await c.put(P + "g", "2", guard=(P + "leader", leader - 1)) is None
        assert await c.put(P + "g", "2", expect=0, guard=(P + "leader", leader)) is None
        assert await c.put(P + "h", "1", guard=(P + "nobody", 0))
        await c.delete(P + "leader")
        assert await c.put(P + "g", "3", guard=(P + "leader", leader)) is None
        assert [kv.value for kv in (await c.read(P + "g"))[1]] == ["1"]

    check(scenario)


def test_delete(check):
    async def scenario(c):
        assert await c.delete(P + "a") is False
        first = await c.put(P + "a", "1")
        assert await c.delete(P + "a", expect=first + 1) is False
        assert await c.delete(P + "a", expect=first) is True
        assert (await c.read(P))[1] == []
        again = await c.put(P + "a", "1", expect=0)
        assert again > first

    check(scenario)


def test_delete_a_prefix_and_nothing_beside_it(check):
    async def scenario(c):
        for name in ("x/1", "x/2", "x/é", "x", "y"):
            await c.put(P + name, "v")
        assert await c.delete(P + "x/", prefix=True) is True
        assert await c.delete(P + "x/", prefix=True) is False
        assert [kv.key for kv in (await c.read(P))[1]] == [P + "x", P + "y"]
        with pytest.raises(ValueError):
            await c.delete(P, prefix=True, expect=1)

    check(scenario)


def test_read_is_in_byte_order_and_holds_the_prefix_alone(check):
    async def scenario(c):
        for name in ("b", "a/2", "a/10", "ä", "Z"):
            await c.put(P + name, name)
        assert [kv.value for kv in (await c.read(P))[1]] == ["Z", "a/10", "a/2", "b", "ä"]
        assert [kv.value for kv in (await c.read(P + "a/"))[1]] == ["a/10", "a/2"]
        assert (await c.read(P + "nothing"))[1] == []

    check(scenario)


@pytest.mark.parametrize("value", ["", "é ∑ 漢字 🙂", "line\nbreak\0nul", "x" * 1_000_000])
def test_values_come_back_as_they_were(check, value):
    async def scenario(c):
        before, _ = await c.read(P)
        await c.put(P + "ключ", value)
        assert [(kv.key, kv.value) for kv in (await c.read(P))[1]] == [(P + "ключ", value)]
        async with aclosing(c.watch(P, before)) as watch:
            assert [(event.key, event.value) for event in await take(watch, 1)] == [(P + "ключ", value)]

    check(scenario)


def test_what_is_too_large_is_refused(check):
    async def scenario(c):
        with pytest.raises(CoordinatorRefused, match="large"):
            await c.put(P + "a", "x" * 2_000_000)
        with pytest.raises(CoordinatorRefused):
            await c.put("", "x")
        assert (await c.read(P))[1] == []

    check(scenario)


def test_a_lease_that_is_renewed_keeps_its_keys(check):
    async def scenario(c):
        lease = await c.grant(20)
        await c.put(P + "node", "me", lease=lease)
        granted_s = await c.keep_alive(lease)
        assert granted_s >= 20
        assert [kv.lease for kv in (await c.read(P))[1]] == [lease]

    check(scenario)


def test_a_lease_that_is_not_renewed_ends_with_its_keys(check):
    async def scenario(c):
        await c.put(P + "other", "stays")
        revision, _ = await c.read(P)
        lease = await c.grant(4)  # long enough for the key to be put, also where that takes a while
        await c.put(P + "node", "me", lease=lease)
        async with aclosing(c.watch(P, revision)) as watch:
            put, event = await take(watch, 2)
        assert (put.key, put.value) == (P + "node", "me")
        assert (event.key, event.value) == (P + "node", None)
        assert event.revision > put.revision > revision
        assert [kv.key for kv in (await c.read(P))[1]] == [P + "other"]
        with pytest.raises(LeaseGone):
            await c.keep_alive(lease)
        with pytest.raises(LeaseGone):
            await c.put(P + "node", "late", lease=lease)
        await c.revoke(lease)

    check(scenario)


def test_revoking_deletes_all_keys_of_the_lease_in_one_revision(check):
    async def scenario(c):
        lease = await c.grant(60)
        await c.put(P + "a", "1", lease=lease)
        await c.put(P + "b", "1", lease=lease)
        await c.put(P + "c", "1", lease=lease)
        await c.put(P + "c", "2")  # taken off the lease
        revision, _ = await c.read(P)
        async with aclosing(c.watch(P, revision)) as watch:
            await c.revoke(lease)
            events = await take(watch, 2)
        assert {(event.key, event.value) for event in events} == {(P + "a", None), (P + "b", None)}
        assert len({event.revision for event in events}) == 1
        assert [kv.key for kv in (await c.read(P))[1]] == [P + "c"]
        with pytest.raises(LeaseGone):
            await c.keep_alive(lease)
        await c.revoke(lease)

    check(scenario)


def test_a_lease_that_never_was_is_gone(check):
    async def scenario(c):
        with pytest.raises(LeaseGone):
            await c.keep_alive(123456)
        with pytest.raises(LeaseGone):
            await c.put(P + "a", "1", lease=123456)

    check(scenario)


def test_one_of_many_wins(check):
    async def scenario(c):
        for turn in range(5):
            results = await asyncio.gather(*(c.put(f"{P}{turn}", str(who), expect=0) for who in range(8)))
            (winner,) = [who for who, revision in enumerate(results) if revision is not None]
            (kept,) = (await c.read(f"{P}{turn}"))[1]
            assert (kept.value, kept.revision) == (str(winner), results[winner])

    check(scenario)


def test_a_watch_tells_everything_once_and_in_order(check):
    async def scenario(c):
        revision, _ = await c.read(P)
        await c.put(P + "before", "seen too")
        async with aclosing(c.watch(P, revision)) as watch:
            wanted = [(P + "before", "seen too")]
            for turn in range(60):
                await c.put(f"{P}{turn % 7}", str(turn))
                wanted.append((f"{P}{turn % 7}", str(turn)))
                await c.put("/keepstep/job2/elsewhere", "x")
                if turn % 20 == 19:
                    await c.delete(P + "0")
                    wanted.append((P + "0", None))
            events = await take(watch, len(wanted))
        assert [(event.key, event.value) for event in events] == wanted
        revisions = [event.revision for event in events]
        assert revisions == sorted(set(revisions))
        assert revisions[0] == revision + 1

    check(scenario)


def test_a_watch_begins_after_the_revision_given(check):
    async def scenario(c):
        await c.put(P + "a", "1")
        second = await c.put(P + "a", "2")
        third = await c.put(P + "a", "3")
        async with aclosing(c.watch(P, second)) as watch:
            assert await take(watch, 1) == [KeyEvent(P + "a", "3", third)]

    check(scenario)


def test_two_watches_hear_the_same(check):
    async def scenario(c):
        revision, _ = await c.read(P)
        async with aclosing(c.watch(P, revision)) as one, aclosing(c.watch(P + "a", revision)) as other:
            await c.put(P + "b", "1")
            await c.put(P + "a", "2")
            assert [event.value for event in await take(one, 2)] == ["1", "2"]
            assert [event.value for event in await take(other, 1)] == ["2"]

    check(scenario)


def test_a_span_of_a_prefix_is_read_and_watched_alone(check):
    async def scenario(c):
        for name in ("a", "b", "m/1", "s", "sz"):
            await c.put(P + name, name)
        revision, found = await c.read(P, ("b", "s"))
        assert [kv.key for kv in found] == [P + "b", P + "m/1"]
        async with aclosing(c.watch(P, revision, ("b", "s"))) as watch:
            for name in ("a", "s", "m/2", "t"):
                await c.put(P + name, "new")
            await c.delete(P + "a")
            await c.delete(P + "b")
            events = await take(watch, 2)
        assert [(event.key, event.value) for event in events] == [(P + "m/2", "new"), (P + "b", None)]

    check(scenario)


def test_a_closed_watch_ends(check):
    async def scenario(c):
        revision, _ = await c.read(P)
        watch = c.watch(P, revision)
        waiting = asyncio.ensure_future(anext(watch))
        await c.put("/keepstep/job2/elsewhere", "x")
        await watch.aclose()
        await watch.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting
        with pytest.raises(StopAsyncIteration):
            await anext(watch)

    check(scenario)


def test_closing_the_coordinator_ends_its_watches(check):
    async def scenario(c):
        revision, _ = await c.read(P)
        watch = c.watch(P, revision)
        await c.close()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        with pytest.raises(Exception, match="closed"):
            await c.read(P)

    check(scenario)


def test_a_watch_from_a_revision_never_reached_is_lost(check):
    async def scenario(c):
        revision, _ = await c.read(P)
        async with aclosing(c.watch(P, revision + 1000)) as watch:
            with pytest.raises(WatchLost):
                await anext(watch)
            with pytest.raises(StopAsyncIteration):
                await anext(watch)

    check(scenario)
