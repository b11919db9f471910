"""Kinds of fault. Each says whether it happened when it was asked to, so that one that never fires is found out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from keepstep.core import events as e
from keepstep.core.values import frozen

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost
    from keepstep.simulation.run import World
    from keepstep.simulation.worker import SimWorker


@frozen
class Fault:
    """A kind of fault: `strike(world, random)` returns whether it happened."""

    name: str
    strike: Callable[[World, Random], bool]


def _some_host(world: World, random: Random) -> SimHost | None:
    up = [host for host in world.hosts.values() if host.up and host.state is not None]
    return random.choice(up) if up else None


def _kill_worker(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.worker is None:
        return False
    host.worker.killed(9)
    return True


def _script_raises(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.worker is None:
        return False
    at = world.clock.now + host.skew_s
    host.worker.fails(e.FirstError("ValueError", f"bad {random.random()}", at, host.worker.entered, False))
    return True


def _kill_agent(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.frozen:
        return False
    host.kill_agent()
    return True


def _kill_uploader(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.uploader_down:
        return False
    host.uploader_down = True
    world.clock.after(random.uniform(0.2, 1.0), lambda: setattr(host, "uploader_down", False))
    return True


def _freeze_agent(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.frozen:
        return False
    host.freeze(random.choice((0.5, 2.0, 6.0, 12.0)))
    return True


def _partition(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.cut:
        return False
    host.cut = True
    world.clock.after(random.choice((0.5, 2.0, 8.0, 15.0)), host.mend)
    return True


def _slow_messages(world: World, random: Random) -> bool:
    if world.latency_max_s > 0.01:
        return False
    world.latency_max_s = random.choice((0.2, 0.8))

    def fast() -> None:
        world.latency_max_s = 0.01

    world.clock.after(random.uniform(1.0, 10.0), fast)
    return True


def _store_outage(world: World, random: Random) -> bool:
    if world.store.down:
        return False
    world.store.down = True
    world.clock.after(random.uniform(1.0, 20.0), lambda: setattr(world.store, "down", False))
    return True


def _lose_host(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.name == world.names[0]:
        return False
    host.power_off()
    world.clock.after(random.uniform(1.0, 15.0), host.power_on)
    return True


def _lose_etcd_host(world: World, random: Random) -> bool:
    host = world.hosts[world.names[0]]
    if not host.up or world.coordinator.down:
        return False
    world.coordinator.down = True
    host.power_off()

    def back() -> None:
        world.coordinator.wipe()
        world.coordinator.down = False
        host.power_on()
        for other in world.hosts.values():
            other.mend() if not other.cut else None

    world.clock.after(random.uniform(1.0, 15.0), back)
    return True


def _etcd_hiccup(world: World, random: Random) -> bool:
    if world.coordinator.down:
        return False
    world.coordinator.down = True
    world.clock.after(2.0, lambda: setattr(world.coordinator, "down", world.hosts[world.names[0]].gone))
    return True


def _watch_stutters(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or host.cut or host.frozen:
        return False
    host.stutter()
    return True


def _a_worker(world: World, random: Random) -> SimWorker | None:
    host = _some_host(world, random)
    return None if host is None or host.worker is None or not host.worker.joined else host.worker


def _script_returns(world: World, random: Random) -> bool:
    worker = _a_worker(world, random)
    if worker is None or worker.completed >= world.last_step:  # by then a script returns only with its last snapshot
        return False
    worker.returns()
    return True


def _script_bug(world: World, random: Random) -> bool:
    """The script raises each time it enters a step, until somebody repairs the data."""
    worker = _a_worker(world, random)
    if worker is None or world.bug_at_step >= 0:
        return False
    world.bug_at_step = worker.entered + random.randint(1, 3)
    world.clock.after(random.uniform(5.0, 20.0), lambda: setattr(world, "bug_at_step", -1))
    return True


def _worker_frozen(world: World, random: Random) -> bool:
    worker = _a_worker(world, random)
    if worker is None:
        return False
    worker.frozen_until = world.clock.now + random.uniform(1.0, 20.0)
    return True


def _worker_hangs(world: World, random: Random) -> bool:
    """Some rank enters no further step; the others wait for it, and would for ever."""
    worker = _a_worker(world, random)
    if worker is None or random.random() < 0.5 or worker.completed >= world.last_step:
        return False
    worker.hangs = True
    world.hung.add(worker.spec.worker_id)
    return True


def _replica_diverges(world: World, random: Random) -> bool:
    """A bit flips in one replica; what it seals from now on is not what the others seal."""
    worker = _a_worker(world, random)
    if worker is None or random.random() < 0.5:
        return False
    worker.diverged = True
    return True


def _torn_snapshot(world: World, random: Random) -> bool:
    """What the worker seals next is not what it should be, and then it dies."""
    worker = _a_worker(world, random)
    if worker is None or worker.completed >= world.last_step:
        return False
    worker.tears = True
    return True


def _checkpoint_rots(world: World, random: Random) -> bool:
    """The newest checkpoint does not read back any more, and then a host is lost."""
    head = world.store.head
    if head is None or not head.manifest or head.step == world.last_step:
        return False
    if not _lose_host(world, random):
        return False
    world.store.rotten.add(head.manifest)
    return True


def _store_refuses(world: World, random: Random) -> bool:
    if random.random() < 0.6 or world.store.refuses:
        return False
    world.store.refuses = True
    world.clock.after(random.uniform(1.0, 30.0), lambda: setattr(world.store, "refuses", False))
    return True


def _answers_lost(world: World, random: Random) -> bool:
    if world.store.loses_answers:
        return False
    world.store.loses_answers = True
    world.clock.after(random.uniform(5.0, 30.0), lambda: setattr(world.store, "loses_answers", False))
    return True


def _lose_host_for_good(world: World, random: Random) -> bool:
    host = _some_host(world, random)
    if host is None or random.random() < 0.6:
        return False
    host.power_off(for_good=True)
    if host.name == world.names[0]:
        world.coordinator.down = True
    return True


def _interruption(world: World, random: Random) -> bool:
    """All hosts are told within half a second; or one is told later than the others, or nobody but one."""
    if random.random() < 0.6 or world.interrupted or any(not host.up for host in world.hosts.values()):
        return False
    world.interrupted_at = world.clock.now
    hosts, how = list(world.hosts.values()), random.choice(("all", "all", "late", "one"))
    first = random.choice(hosts)
    for host in hosts:
        if how != "one" or host is first:
            host.interrupt(random.uniform(2.0, 20.0) if how == "late" and host is first else random.uniform(0.0, 0.5))
    return True


def _interruption_of_a_frozen_worker(world: World, random: Random) -> bool:
    """The drain can not be: one worker does not answer for longer than the grace."""
    worker = _a_worker(world, random)
    if worker is None or not _interruption(world, random):
        return False
    worker.frozen_until = world.clock.now + 200.0
    return True


FAULTS = (
    Fault("worker_killed", _kill_worker),
    Fault("script_raises", _script_raises),
    Fault("agent_killed", _kill_agent),
    Fault("uploader_killed", _kill_uploader),
    Fault("agent_frozen", _freeze_agent),
    Fault("partition", _partition),
    Fault("slow_messages", _slow_messages),
    Fault("store_outage", _store_outage),
    Fault("host_lost", _lose_host),
    Fault("etcd_host_lost", _lose_etcd_host),
    Fault("etcd_hiccup", _etcd_hiccup),
    Fault("watch_stutters", _watch_stutters),
    Fault("script_returns", _script_returns),
    Fault("script_bug", _script_bug),
    Fault("worker_frozen", _worker_frozen),
    Fault("worker_hangs", _worker_hangs),
    Fault("replica_diverges", _replica_diverges),
    Fault("torn_snapshot", _torn_snapshot),
    Fault("checkpoint_rots", _checkpoint_rots),
    Fault("store_refuses", _store_refuses),
    Fault("commit_answers_lost", _answers_lost),
    Fault("host_lost_for_good", _lose_host_for_good),
    Fault("frozen_worker_interrupted", _interruption_of_a_frozen_worker),
    Fault("interruption", _interruption),
)
