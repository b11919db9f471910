"""Kinds of fault that need several hosts: lines that are cut, halves, a leader that is lost, an operator's orders."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, cast

from keepstep.simulation.faults import FAULTS, Fault

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost
    from keepstep.simulation.many import ManyWorld
    from keepstep.simulation.run import World


def _many(name: str, strike: Callable[[ManyWorld, Random], bool]) -> Fault:
    return Fault(name, lambda world, random: strike(cast("ManyWorld", world), random))


def _up(world: World) -> list[SimHost]:
    return [host for host in world.hosts.values() if host.up and host.state is not None]


def _some(world: World, random: Random) -> SimHost | None:
    up = _up(world)
    return random.choice(up) if up else None


def _leader(world: ManyWorld) -> SimHost | None:
    kept = world.etcd.kept.get("leader")
    host = world.hosts[kept.record.host] if kept is not None else None  # type: ignore[union-attr]
    return host if host is not None and host.up and host.state is not None else None


def _off(world: ManyWorld, random: Random, host: SimHost | None, for_good: bool = False) -> bool:
    if host is None:
        return False
    host.power_off(for_good)
    world.etcd.lose_data(host.name)
    if not for_good:
        world.clock.after(random.choice((1.0, 5.0, 10.0, 30.0)), lambda: _on(world, host))
    return True


def _on(world: ManyWorld, host: SimHost) -> None:
    """The host is back under its name, and knows nothing; its member, if it still has one, is replaced by a new one."""
    host.power_on()
    world.etcd.changed()
    life = host.life

    def rejoin() -> None:
        if host.life == life and host.name in world.etcd.members and host.name not in world.etcd.data:
            if not world.etcd.join(host.name, world.etcd.members):
                world.clock.after(1.0, rejoin)

    world.clock.after(random_delay(host), rejoin)


def random_delay(host: SimHost) -> float:
    """How long a member takes to start."""
    return host.random.uniform(0.5, 3.0)


def _cut(world: ManyWorld, random: Random, outgoing: bool) -> bool:
    """One direction between a host and all others."""
    host = _some(world, random)
    if host is None:
        return False
    others = [name for name in world.names if name != host.name]
    lines = {(host.name, other) if outgoing else (other, host.name) for other in others}
    world.network.cuts |= lines
    world.etcd.changed()

    def mend() -> None:
        world.network.cuts -= lines
        world.etcd.changed()

    world.clock.after(random.choice((1.0, 4.0, 8.0, 15.0)), mend)
    return True


def _halves(world: ManyWorld, random: Random) -> bool:
    if world.network.part:
        return False
    hosts = list(world.names)
    random.shuffle(hosts)
    world.network.part = dict.fromkeys(hosts[: len(hosts) // 2], 1)
    world.etcd.changed()

    def mend() -> None:
        world.network.part = {}
        world.etcd.changed()

    world.clock.after(random.choice((2.0, 8.0, 15.0)), mend)
    return True


def _freeze_leader(world: ManyWorld, random: Random) -> bool:
    host = _leader(world)
    if host is None or host.frozen:
        return False
    host.freeze(random.choice((2.0, 6.0, 12.0)))
    return True


def _kill_member(world: ManyWorld, random: Random) -> bool:
    """The etcd process of a host that lives; it is started again on its data."""
    alive = [m for m in world.etcd.quorum if m not in world.etcd.killed]
    if not alive:
        return False
    host = random.choice(alive)
    world.etcd.killed.add(host)
    world.etcd.changed()

    def back() -> None:
        world.etcd.killed.discard(host)
        world.etcd.changed()

    world.clock.after(random.uniform(0.5, 4.0), back)
    return True


def _off_for_good(world: ManyWorld, random: Random) -> bool:
    return random.random() < 0.5 and _off(world, random, _some(world, random), for_good=True)


def _drain(world: ManyWorld, random: Random) -> bool:
    return random.random() < 0.2 and world.operator_drains()


def _cordon(world: ManyWorld, random: Random) -> bool:
    return world.operator_cordons(random.choice(world.names), random.choice((3.0, 10.0, 30.0)))


_ALSO = (
    "worker_killed", "script_raises", "agent_killed", "uploader_killed", "agent_frozen", "slow_messages",
    "store_outage", "watch_stutters", "worker_hangs",
)  # fmt: skip

MANY_FAULTS = (
    *(fault for fault in FAULTS if fault.name in _ALSO),
    _many("host_off", lambda world, random: _off(world, random, _some(world, random))),
    _many("leader_off", lambda world, random: _off(world, random, _leader(world))),
    _many("host_off_for_good", _off_for_good),
    _many("requests_lost", lambda world, random: _cut(world, random, outgoing=True)),
    _many("answers_lost", lambda world, random: _cut(world, random, outgoing=False)),
    _many("halves", _halves),
    _many("leader_frozen", _freeze_leader),
    _many("etcd_member_killed", _kill_member),
    _many("cordon", _cordon),
    _many("restart", lambda world, random: world.operator_restarts()),
    _many("drain", _drain),
)
