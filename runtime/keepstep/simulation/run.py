"""What one seed does: a job on a few hosts, faults while they last, then peace; and what must hold all along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.decide import decide
from keepstep.core.policy import Policy
from keepstep.core.records import GenerationRecord, Record
from keepstep.core.state import Decision, State
from keepstep.simulation.checkers import Checkers
from keepstep.simulation.clockwork import Clockwork
from keepstep.simulation.fakes import FakeCoordinator, FakeStore
from keepstep.simulation.faults import FAULTS, Fault
from keepstep.simulation.host import SimHost
from keepstep.simulation.silent import SilentWorker
from keepstep.simulation.worker import SimWorker

FAULTS_LAST_S = 60.0
_STEP_S = _AGAIN_S = 0.5
SILENT_EVERY = 8
"""One seed of so many has a script that says nothing and writes its own files."""
PEACE_S = 1_100.0
"""Longer than hosts are waited for at first."""


@dataclass
class Outcome:
    """What became of a seed: `violations` is empty when all is well."""

    seed: int
    violations: list[str]
    fired: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    virtual_s: float = 0.0
    hosts: int = 0
    codes: tuple[int, ...] = ()


class World:
    """Everything of one simulated job.

    Attributes:
        wrong: hosts that compute something else than the others would.
    """

    def __init__(self, seed: int, policy: Policy, hosts: int, last_step: int) -> None:
        self.random, self.policy, self.last_step = Random(seed), policy, last_step
        self.silent = seed % SILENT_EVERY == 1
        self.clock = Clockwork()
        self.names = tuple(f"algo-{n}" for n in range(1, hosts + 1))
        self.faults_last_s, self.fault_every_s = FAULTS_LAST_S, 8.0
        self.coordinator = self._coordinator(self.clock)
        self.coordinator.on_expiry.append(self._lease_expired)
        self.store = FakeStore()
        self.etcd_hosts = self.names[:1]
        self.latency_max_s = 0.01
        self.watch_latency_s = 0.003
        self.seals = 0
        self.interrupted_at: float | None = None
        self.interrupted: set[str] = set()
        self.bug_at_step = -1
        self.hung: set[str] = set()
        self.wrong: set[str] = set()
        self.snapshot_s = self.random.choice((0.001, 0.02, 0.04))
        self.fired: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.turns = 0
        self.checkers = Checkers(self)
        self.hosts = {name: SimHost(self, name, Random(f"{seed}/{name}")) for name in self.names}
        self._barriers: dict[tuple[int, int], list[SimWorker]] = {}
        self._broken: set[int] = set()
        self.trace: Callable[[SimHost, e.Event, Decision], None] | None = None

    def make_worker(self, host: SimHost, spec: a.StartWorker) -> SimWorker:
        """A worker of the job's script: one that speaks, or a silent one."""
        return (SilentWorker if self.silent else SimWorker)(host, spec, host.random)

    def _coordinator(self, clock: Clockwork) -> FakeCoordinator:
        return FakeCoordinator(clock)

    def known_etcd_hosts(self) -> tuple[str, ...]:
        """Where an agent that starts asks for etcd."""
        return self.etcd_hosts

    def latency_s(self, random: Random) -> float:
        return random.uniform(0.0005, self.latency_max_s)

    # --- a world of workers ------------------------------------------------------------------------------------------

    def at_barrier(self, worker: SimWorker, step: int) -> None:
        """A step is computed once all ranks of the generation have entered it; it fails when one of them is dead."""
        key = (worker.spec.generation, step)
        if worker.spec.generation in self._broken:
            self._becomes_victim(worker)
            return
        waiting = [w for w in self._barriers.get(key, []) if w.alive]
        waiting.append(worker)
        self._barriers[key] = waiting
        if len(waiting) == worker.size:
            del self._barriers[key]
            self.clock.after(self.step_s(), lambda: self._complete(waiting, step))

    def _complete(self, workers: list[SimWorker], step: int) -> None:
        if not self.lines_between(workers):
            self.clock.after(_AGAIN_S, lambda: self._complete(workers, step))
        elif all(worker.alive for worker in workers):
            for worker in workers:
                worker.step_done(step)
        else:
            for worker in workers:
                self._becomes_victim(worker)

    def step_s(self) -> float:
        """How long the next step takes once all ranks are in it."""
        return _STEP_S

    def lines_between(self, workers: list[SimWorker]) -> bool:
        """Whether these workers hear each other."""
        return True

    def peer_died(self, worker: SimWorker) -> None:
        """Who waits for a dead rank becomes its victim, and so does who comes to wait for it later."""
        self._broken.add(worker.spec.generation)
        for other in [w for waiting in self._barriers.values() for w in waiting]:
            if other.spec.generation == worker.spec.generation and other is not worker:
                self._becomes_victim(other)

    def _becomes_victim(self, worker: SimWorker) -> None:
        error = e.FirstError("UnavailableError", "collective ops aborted", worker.host.now(), worker.entered, True)
        self.clock.after(self.random.uniform(0.03, 0.7), lambda: worker.fails(error))

    def decide(self, state: State, event: e.Event, now: float) -> Decision:
        """A node's turn."""
        return decide(state, event, now)

    # --- what is seen ------------------------------------------------------------------------------------------------

    def seen(self, host: SimHost, event: e.Event, decision: Decision) -> None:
        self.turns += 1
        for note in decision.notes:
            self.reasons[note.reason.value] += 1
        self.checkers.decided(host, decision)
        if self.trace is not None:
            self.trace(host, event, decision)

    def check_put(self, host: SimHost, record: Record) -> None:
        if isinstance(record, GenerationRecord):
            self.checkers.put(host, record)

    def host_changed(self) -> None:
        """A container came, or left."""

    def check_ready(self, record: GenerationRecord) -> None:
        """A generation becomes ready."""

    def check_commit(self, run: str, generation: int) -> None:
        """A checkpoint was committed."""

    def gives_up(self, host: SimHost, record: GenerationRecord | None = None) -> None:
        """A host leaves, or ends the job, since hosts are missing."""

    def worker_started(self, host: SimHost, worker: SimWorker) -> None:
        self.checkers.started(host, worker)

    def restored(self, worker: SimWorker, step: int) -> None:
        self.checkers.restored(worker, step)

    def completed(self, worker: SimWorker, step: int) -> None:
        self.checkers.completed(worker, step)

    def _lease_expired(self, lease: int) -> None:
        self.checkers.lease_expired(lease)

    # --- the plot ----------------------------------------------------------------------------------------------------

    def inflict(self, fault: Fault) -> None:
        """Do a fault, if it can happen now; count it."""
        if fault.strike(self, self.random):
            self.fired[fault.name] += 1

    def play(self, faults: Sequence[Fault] = FAULTS) -> None:
        """Power on, let faults happen, let peace come, and see the job end; stop at the first rule that is broken."""
        for host in self.hosts.values():
            self.clock.after(self.random.uniform(0.0, 2.0), host.power_on)
        at = 0.0
        while faults:
            at += self.random.expovariate(1 / self.fault_every_s)
            if at > self.faults_last_s:
                break
            fault = self.random.choice(faults)
            self.clock.after(at, lambda f=fault: self.inflict(f))  # type: ignore[misc]
        end = self.clock.now + self.faults_last_s + PEACE_S
        self.clock.run_until(end, lambda: bool(self.checkers.violations) or self._over())
        if not self.checkers.violations and not self._over():
            self.checkers.violation("liveness: the job did not end after the faults had stopped")

    def _over(self) -> bool:
        return all(not host.up and (host.gone or host.exit_code is not None) for host in self.hosts.values())


def run_seed(seed: int, policy: Policy, trace: Callable[[SimHost, e.Event, Decision], None] | None = None) -> Outcome:
    """Play one seed, and a second run of the job where the first one was interrupted."""
    random = Random(seed)
    hosts, last_step = random.choice((2, 2, 3)), random.choice((20, 40, 80))
    world = World(seed, policy, hosts, last_step)
    world.trace = trace
    world.play()
    violations = list(world.checkers.violations)
    violations += [] if violations else world.checkers.at_the_end()
    fired, reasons, turns = world.fired, world.reasons, world.turns
    if not violations and any(host.exit_code == 143 for host in world.hosts.values()):
        again = World(seed + 1_000_000, policy, hosts, last_step)
        again.store, again.trace, again.silent = world.store, trace, world.silent
        again.store.heal()
        again.play()
        violations += again.checkers.violations + again.checkers.at_the_end()
        reasons += again.reasons
        turns += again.turns
    return Outcome(seed, violations, fired, reasons, turns, world.clock.now - 1_000_000.0)
