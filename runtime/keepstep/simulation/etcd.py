"""etcd of several members as nodes see it: it answers whom it can reach while a majority of its members is together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

from keepstep.core.job import first_etcd_hosts
from keepstep.simulation.clockwork import Clockwork
from keepstep.simulation.fakes import FakeCoordinator


class Network:
    """Which host hears which: one-way cuts, and a split into parts that hear nothing of each other."""

    def __init__(self) -> None:
        self.cuts: set[tuple[str, str]] = set()
        self.part: dict[str, int] = {}

    @property
    def whole(self) -> bool:
        return not self.cuts and not self.part

    def hears(self, sender: str, receiver: str) -> bool:
        """Whether what `sender` says arrives at `receiver`; a host always hears itself."""
        if sender == receiver or self.whole:
            return True
        same = self.part.get(sender, 0) == self.part.get(receiver, 0)
        return same and (sender, receiver) not in self.cuts

    def together(self, hosts: Iterable[str]) -> bool:
        """Whether all of them hear each other, both ways."""
        return all(self.hears(a, b) and self.hears(b, a) for a, b in combinations(hosts, 2))


class FakeEtcd(FakeCoordinator):
    """A coordinator kept by members on the job's hosts.

    Attributes:
        members: hosts of the members, as the members themselves know them.
        data: the members that have their data; a machine that is lost takes it along.
        lost_majority: whether the data of most members was ever lost.
    """

    def __init__(self, clock: Clockwork, network: Network, hosts: tuple[str, ...], up: Callable[[str], bool]) -> None:
        super().__init__(clock)
        self.network, self.first, self._up = network, first_etcd_hosts(hosts), up
        self.members = self.first
        self.data: set[str] = set(self.first)
        self.killed: set[str] = set()
        self.lost_majority = False
        self.on_change: list[Callable[[], None]] = []
        self._quorum: tuple[str, ...] | None = None

    def changed(self) -> None:
        """A member, a host or a line between hosts came or went."""
        self._quorum = None
        if not self.down and 2 * len(self.data & set(self.members)) <= len(self.members):
            self.lost_majority = self.down = True
        if self.down:
            self._begin_anew()
        for tell in self.on_change:
            tell()

    def _begin_anew(self) -> None:
        """Once most of the first members' hosts are there again, they start an etcd that knows nothing."""
        there = self._largest(host for host in self.first if self._up(host) and host not in self.killed)
        if self.members == self.first and there:
            self.wipe()
            self.data, self.down, self._quorum = set(self.first), False, None

    def _largest(self, alive: Iterable[str]) -> tuple[str, ...]:
        """Most of the members that are alive and hear each other; empty where they are no majority."""
        hosts = tuple(alive)
        for size in range(len(hosts), len(self.members) // 2, -1):
            for some in combinations(hosts, size):
                if self.network.together(some):
                    return some
        return ()

    @property
    def quorum(self) -> tuple[str, ...]:
        """The members that can answer."""
        if self._quorum is None:
            alive = [m for m in self.members if m in self.data and m not in self.killed and self._up(m)]
            self._quorum = () if self.down else self._largest(alive)
        return self._quorum

    def hears(self, host: str, endpoints: tuple[str, ...]) -> bool:
        """Whether what this host asks arrives at a member that can answer."""
        return any(m in endpoints and self.network.hears(host, m) for m in self.quorum)

    def answers(self, host: str, endpoints: tuple[str, ...]) -> bool:
        """Whether this host hears what a member that can answer says."""
        return any(m in endpoints and self.network.hears(m, host) for m in self.quorum)

    def reaches(self, host: str, endpoints: tuple[str, ...]) -> bool:
        """Whether one and the same member hears the host and is heard by it."""
        lines = self.network.hears
        return any(m in endpoints and lines(host, m) and lines(m, host) for m in self.quorum)

    def lose_data(self, host: str) -> None:
        """The machine is gone."""
        self.data.discard(host)
        self.killed.discard(host)
        self.changed()

    def join(self, host: str, hosts: tuple[str, ...]) -> bool:
        """Make `hosts` the members, this one with a copy of the data; False where no majority is there to agree."""
        if not self.reaches(host, self.quorum):
            return False
        self.members = hosts
        self.data.add(host)
        self.changed()
        return True

    def _expire(self, lease: int) -> None:
        """No lease expires while nobody can renew one: a new leader of etcd begins its time afresh."""
        at = self.leases.get(lease)
        if at is not None and not self.quorum:
            self.leases[lease] = self._clock.now + 5.0
            self._clock.after(5.001, lambda: self._expire(lease))
        else:
            super()._expire(lease)
