"""The sensor of a host: what it posts, shows and says, by samples of a host that is hurt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from dataclasses import replace

import pytest

from keepstep.app.host_health import HostWatch
from keepstep.core.events import Event, StrainsChanged
from keepstep.core.host_sample import Disk, HostSample, StrainKind

FULL = Disk("/tmp", 100 * 10**9, 180_000_000)
EVERY_S = 5.0


class Host:
    """A host, and who listens to its sensor."""

    def __init__(self) -> None:
        self.sample = HostSample(at=0.0, unix_s=1000.0, throttled_s=0.0, group_cpu_s=0.0)
        self.posted: list[Event] = []
        self.shown: list[set[StrainKind]] = []
        self.said: list[str] = []
        self.watch = HostWatch(lambda: self.sample, self, self.posted.append, self.said.append, every_s=0.0)

    def host(self, sample: HostSample, strained: Collection[StrainKind]) -> None:
        self.shown.append(set(strained))

    def goes_on(self, looks: int, throttled_ratio: float = 0.0, **changes: object) -> None:
        """So many looks, in all of which it lacks as much."""
        for _ in range(looks):
            now = self.sample
            self.sample = replace(
                now,
                at=now.at + EVERY_S,
                unix_s=now.unix_s + EVERY_S,
                throttled_s=now.throttled_s + EVERY_S * throttled_ratio,
                group_cpu_s=now.group_cpu_s + EVERY_S * (1 - throttled_ratio),
                **changes,
            )
            self.watch.absorb(self.sample)

    @property
    def told(self) -> list[tuple[str, ...]]:
        return [event.strains for event in self.posted if isinstance(event, StrainsChanged)]


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_host_that_is_well_posts_nothing(host):
    host.goes_on(100)
    assert host.posted == host.said == [] and host.shown == [set()] * 100


def test_a_quota_is_told_once_and_that_it_is_over(host):
    host.goes_on(3)
    host.goes_on(20, throttled_ratio=0.4)
    assert host.told == [
        ("cpu held back by its quota 13 % of the time",),
        ("cpu held back by its quota 40 % of the time",),
    ]
    assert host.shown[-1] == {StrainKind.CPU_QUOTA}
    host.goes_on(20)
    assert host.told[2:] == [()] and host.shown[-1] == set()
    assert host.said == []
    assert {event.source for event in host.posted} == {"host"}


def test_a_full_disk_is_told_at_the_first_look_and_said_once(host):
    host.goes_on(3, disks=(FULL,))
    host.goes_on(20, disks=())
    host.goes_on(3, disks=(FULL,))
    assert host.told == [("disk /tmp has 180 MB left",), (), ("disk /tmp has 180 MB left",)]
    (said,) = host.said
    assert said.startswith("disk /tmp has 180 MB left: ") and "larger volume" in said


def test_a_sample_of_a_while_ago_is_compared_though_the_agent_stood_still(host):
    host.goes_on(10)
    host.sample = replace(host.sample, at=host.sample.at + 600, unix_s=host.sample.unix_s + 600)
    host.goes_on(5)
    assert host.posted == []
    host.sample = replace(host.sample, unix_s=host.sample.unix_s - 3.2)
    host.goes_on(1)
    assert host.told == [("clock was set by -3.2 s",)]


def test_it_looks_in_a_thread_and_goes_on_until_it_is_stopped(host):
    async def look() -> None:
        seen = asyncio.Event()
        threads = set()

        def read() -> HostSample:
            threads.add(threading.current_thread())
            return replace(HostSample(0.0), disks=(FULL,))

        host.watch = HostWatch(read, host, lambda event: seen.set(), host.said.append, every_s=0.0)
        task = asyncio.create_task(host.watch.run())
        async with asyncio.timeout(30):
            await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert threads and threading.current_thread() not in threads

    asyncio.run(look())


def test_a_driver_that_hangs_holds_up_neither_the_loop_nor_the_end(host):
    gate, asked = threading.Event(), threading.Event()

    def read() -> HostSample:
        asked.set()
        gate.wait(30)
        return host.sample

    async def look() -> None:
        host.watch = HostWatch(read, host, host.posted.append, host.said.append, every_s=0.0)
        task = asyncio.create_task(host.watch.run())
        async with asyncio.timeout(30):
            while not asked.is_set():
                await asyncio.to_thread(asked.wait, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(look())
    gate.set()
    assert host.posted == []


def test_a_host_that_can_not_be_read_is_left_alone(host, monkeypatch):
    traces = []
    monkeypatch.setattr(threading, "excepthook", lambda what: traces.append(what.exc_type))

    def read() -> HostSample:
        raise ValueError("a kernel like no other")

    host.watch = HostWatch(read, host, host.posted.append, host.said.append, every_s=0.0)
    asyncio.run(asyncio.wait_for(host.watch.run(), 30))
    assert traces == [ValueError]
    assert host.said == ["this host can not be read: nothing will be told of what strains it"]
