"""What the iterator of a watch gives to whoever asks late."""

from __future__ import annotations

import asyncio

import pytest

from keepstep.adapters.etcd.watch import EtcdWatch
from keepstep.ports import KeyEvent, WatchLost


def changes(first: int, last: int) -> list[KeyEvent]:
    return [KeyEvent("key", "value", revision) for revision in range(first, last + 1)]


async def watch_of(*told: list[KeyEvent]) -> EtcdWatch:
    """A watch that has heard this, as its thread would hand it over, and that nobody has asked yet."""
    watch = EtcdWatch(None, {}, 0, ("marker", None))  # type: ignore[arg-type]
    await asyncio.to_thread(lambda: [watch._deliver(events) for events in told])
    return watch


def test_what_waits_comes_together_and_in_order():
    async def scenario():
        watch = await watch_of(changes(1, 1), changes(2, 4), changes(5, 5))
        assert await anext(watch) == changes(1, 5)

    asyncio.run(scenario())


def test_more_than_a_turn_should_take_comes_in_parts():
    async def scenario():
        watch = await watch_of(*(changes(10 * n + 1, 10 * n + 10) for n in range(60)))
        parts = [await anext(watch) for _ in range(3)]
        assert [event for part in parts for event in part] == changes(1, 600)
        assert max(map(len, parts)) < 300

    asyncio.run(scenario())


@pytest.mark.parametrize(("end", "seen"), [(None, StopAsyncIteration), (WatchLost("gone"), WatchLost)])
def test_an_end_comes_after_what_was_told_before_it(end, seen):
    async def scenario():
        watch = await watch_of(changes(1, 2), changes(3, 3))
        watch._finish(end)
        assert await anext(watch) == changes(1, 3)
        for error in (seen, StopAsyncIteration):
            with pytest.raises(error):
                await anext(watch)

    asyncio.run(scenario())
