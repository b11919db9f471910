"""The in-process coordinator under a virtual clock; what it shares with etcd's is in tests/conformance."""

from __future__ import annotations

import asyncio

import pytest

from keepstep.adapters.coordinator_memory import MemoryCoordinator
from keepstep.ports import KeyEvent, LeaseGone


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lease_lives_by_the_clock_given():
    async def scenario():
        clock = Clock()
        c = MemoryCoordinator(clock)
        lease = await c.grant(4.2)
        revision = await c.put("/n", "me", lease=lease)
        watch = c.watch("/", revision)
        clock.now_s += 4.9
        assert await c.keep_alive(lease) == 5
        clock.now_s += 4.9
        c.expire()
        assert len((await c.read("/"))[1]) == 1
        clock.now_s += 0.2
        c.expire()
        assert await anext(watch) == [KeyEvent("/n", None, revision + 1)]
        with pytest.raises(LeaseGone):
            await c.keep_alive(lease)
        await c.close()

    asyncio.run(scenario())


def test_a_key_put_again_without_a_lease_outlives_it():
    async def scenario():
        clock = Clock()
        c = MemoryCoordinator(clock)
        lease = await c.grant(1)
        await c.put("/n", "me", lease=lease)
        await c.put("/n", "free")
        clock.now_s += 2
        assert [kv.value for kv in (await c.read("/"))[1]] == ["free"]
        await c.close()

    asyncio.run(scenario())
