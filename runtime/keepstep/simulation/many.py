"""What one seed does with a job of 3 to 100 hosts: a random policy, an etcd of several members, an operator."""

from __future__ import annotations

from random import Random

from keepstep.core.job import first_etcd_hosts
from keepstep.core.policy import Elastic, Policy
from keepstep.core.records import CordonRecord, GenerationRecord, OrderRecord, RequestRecord
from keepstep.errors import ExitCode
from keepstep.simulation.clockwork import Clockwork
from keepstep.simulation.etcd import FakeEtcd, Network
from keepstep.simulation.fakes import FakeCoordinator
from keepstep.simulation.host import SimHost
from keepstep.simulation.many_faults import MANY_FAULTS
from keepstep.simulation.run import Outcome, World
from keepstep.simulation.worker import SimWorker

_TICK_S = 1.0
_WELL_AFTER_S = 8.0
"""A shorter spell in which all seems well may be too short for a node to register, and so to notice."""
_ORDER_LASTS_S = 60.0
_SIZES = ((3, 5, 0.74), (6, 10, 0.19), (11, 24, 0.055), (25, 63, 0.01), (64, 100, 0.005))
"""From, to, share of the seeds: what a job costs grows with the square of its hosts."""


class ManyWorld(World):
    """A job of many hosts, and what is known about why it may give up."""

    def __init__(self, seed: int, policy: Policy, hosts: int, last_step: int) -> None:
        self.network = Network()
        super().__init__(seed, policy, hosts, last_step)
        self.etcd_hosts = first_etcd_hosts(self.names)
        self._claimed: set[tuple[str, int]] = set()
        self.cordoned_at: dict[str, float] = {}
        self._well_since: dict[str, float] = {}
        self._well_at: dict[str, float] = {}
        self.etcd.on_change.append(self._lines_changed)
        self._tick()

    def _coordinator(self, clock: Clockwork) -> FakeCoordinator:
        names = tuple(self.names)
        self.etcd = FakeEtcd(clock, self.network, names, lambda host: self.hosts[host].up)
        return self.etcd

    @property
    def low(self) -> int:
        """The fewest hosts that may train."""
        low = self.policy.elastic.hosts.min
        return len(self.names) if low == "all" else low

    def host_changed(self) -> None:
        self.etcd.changed()

    def _lines_changed(self) -> None:
        for host in self.hosts.values():
            if self.etcd.reaches(host.name, host.endpoints):
                host.mend()

    def lines_between(self, workers: list[SimWorker]) -> bool:
        """No collective is computed across the two halves of a split network."""
        return len({self.network.part.get(worker.host.name, 0) for worker in workers if worker.alive}) < 2

    # --- who could have trained --------------------------------------------------------------------------------------

    def present(self) -> int:
        """How many hosts etcd holds a node of that may take part."""
        kept = self.coordinator.kept
        return sum(1 for name in self.names if f"alive/{name}" in kept and f"cordons/{name}" not in kept)

    def _tick(self) -> None:
        enough, now = self.present() >= self.low, self.clock.now
        for host in self.hosts.values():
            if enough and host.state is not None and self.etcd.reaches(host.name, host.endpoints) and not host.frozen:
                since = self._well_since.setdefault(host.name, now)
                if now >= since + _WELL_AFTER_S:
                    self._well_at[host.name] = now
            else:
                self._well_since.pop(host.name, None)
        self.clock.after(_TICK_S, self._tick)

    def gives_up(self, host: SimHost, record: GenerationRecord | None = None) -> None:
        """A host leaves with 75, or ends the job with it: it must have been short of hosts or of etcd for long."""
        ended = self.coordinator.history[-1] if self.coordinator.history else None
        if record is None and ended is not None and ended.exit_code == ExitCode.TOO_FEW_HOSTS:
            return
        well_at = self._well_at.get(host.name, 0.0)
        short_s = self.clock.now - well_at
        if short_s < self.policy.elastic.wait_for_return - 2.0:
            self.checkers.violation(f"{host.name} gives up although all was well {short_s:.1f} s ago")

    # --- an operator -------------------------------------------------------------------------------------------------

    def operator_restarts(self) -> bool:
        if not self.etcd.quorum:
            return False
        number = len(self.etcd.leases) + self.etcd.revision
        record = OrderRecord(f"order{number}", "operator", self.clock.now)
        return self.etcd.put(record, -1, self.etcd.grant(_ORDER_LASTS_S), 0) is not None

    def operator_drains(self) -> bool:
        if not self.etcd.quorum or self.interrupted:
            return False
        now = self.clock.now
        record = RequestRecord("operator", "drain by operator", now, now + 110.0)
        self.interrupted.add("operator")
        return self.etcd.put(record, -1, self.etcd.grant(_ORDER_LASTS_S), 0) is not None

    def operator_cordons(self, host: str, for_s: float) -> bool:
        if not self.etcd.quorum or f"cordons/{host}" in self.etcd.kept:
            return False
        self.etcd.put(CordonRecord(host, "operator", self.clock.now), -1, 0, 0)
        self.cordoned_at[host] = self.clock.now
        self.clock.after(for_s, lambda: self._uncordon(host))
        return True

    def _uncordon(self, host: str) -> None:
        if not self.etcd.quorum and not self.etcd.down:
            self.clock.after(1.0, lambda: self._uncordon(host))
            return
        self.cordoned_at.pop(host, None)
        self.etcd.delete(f"cordons/{host}")

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check_ready(self, record: GenerationRecord) -> None:
        """Enough members, and none of them cordoned for longer than a leader can be without news."""
        if len(record.members) < self.low:
            self.checkers.violation(
                f"generation {record.number} has {len(record.members)} members, {self.low} at least"
            )
        if not self.store.down:
            self._claimed.add((record.run, record.number))
        late = self.clock.now - self.policy.coordination.lease - 1.0
        for member in record.members:
            if f"cordons/{member.host}" in self.etcd.kept and self.cordoned_at.get(member.host, late + 1) < late:
                self.checkers.violation(f"generation {record.number} has {member.host}, which is cordoned")

    def check_commit(self, run: str, generation: int) -> None:
        """Nobody commits once a newer generation is ready, unless no store was there for that one to claim HEAD."""
        ready = [r.number for r in self.coordinator.history if r.run == run and (r.run, r.number) in self._claimed]
        if ready and generation < max(ready):
            self.checkers.violation(f"a commit of generation {generation}, {max(ready)} is ready")

    def at_the_end(self) -> list[str]:
        """Done and saved; or ended for a reason that was looked into when it was given."""
        codes = {host.exit_code for host in self.hosts.values() if not host.too_late and not host.gone}
        allowed: set[int | None] = {0, 75}
        if self.interrupted:
            allowed.add(143)
        if self.fired["store_outage"]:
            allowed.add(77)  # a fresh host that can not read HEAD for as long as hosts are waited for
        found = [f"exit codes {codes}, allowed were {allowed}"] if codes - allowed else []
        return [*found, *(self.checkers.unsaved() if codes == {0} else [])]


def policy_of(random: Random, base: Policy, hosts: int) -> Policy:
    """A policy whose elastic part is drawn at random."""
    low = random.randint((hosts + 1) // 2, hosts)
    most = random.choice(("all", "all", "all", random.randint(low, hosts)))
    drawn = {
        "hosts": {"min": low, "max": most},
        "grow": random.choice(("at_checkpoint", "at_checkpoint", "off")),
        "wait_for_return": random.choice(("6s", "15s", "60s", "120s")),
    }
    elastic = Elastic.model_validate(drawn)
    return base.model_copy(update={"elastic": elastic})


def hosts_of(random: Random) -> int:
    """How many hosts: mostly few, at times a hundred."""
    drawn = random.random()
    for low, high, share in _SIZES:
        if drawn < share:
            return random.randint(low, high)
        drawn -= share
    return random.randint(3, 5)


def run_many(seed: int, base: Policy, hosts: int = 0, trace: object = None) -> Outcome:
    """Play one seed of the campaign; `hosts` 0 draws their number, too."""
    random = Random(f"many/{seed}")
    hosts = hosts or hosts_of(random)
    last_step = random.choice((20, 40)) if hosts <= 10 else 20
    world = ManyWorld(seed, policy_of(random, base, hosts), hosts, last_step)
    world.trace = trace  # type: ignore[assignment]
    world.faults_last_s = 40.0 if hosts <= 10 else 20.0
    world.fault_every_s = random.choice((3.0, 6.0))
    world.play(MANY_FAULTS)
    violations = list(world.checkers.violations) or world.at_the_end()
    return Outcome(
        seed, violations, world.fired, world.reasons, world.turns, world.clock.now - 1_000_000.0, hosts,
        tuple(sorted({host.exit_code for host in world.hosts.values() if host.exit_code is not None})),
    )  # fmt: skip
