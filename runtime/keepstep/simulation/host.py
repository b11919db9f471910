"""One simulated host: init that keeps slabs and minds the lease, an agent that decides, a worker that trains."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.decide import initial_state
from keepstep.core.job import JobSpec
from keepstep.core.records import OF_NODES_KEYS, Phase, Record
from keepstep.core.state import State
from keepstep.simulation.probing import probe
from keepstep.simulation.shelf import Shelf
from keepstep.simulation.uploader import SimUploader
from keepstep.simulation.worker import SimWorker, stand_by

if TYPE_CHECKING:
    from keepstep.simulation.run import World

Change = e.RecordSeen | e.RecordGone
_REMEMBERED = 40
_TOGETHER = 0.5
"""How often an agent hears at one go of what it might have heard of one by one."""


class SimHost:
    """A host of the simulated job; `up` while its container exists."""

    def __init__(self, world: World, name: str, random: Random) -> None:
        self.world, self.name, self.random = world, name, random
        self.up, self.exit_code = False, None  # type: bool, int | None
        self.cut = self.frozen = self.uploader_down = self.gone = False
        self.boot = self.life = 0
        self.too_late = False
        self.endpoints = world.etcd_hosts
        self.watches_all = False
        self.shelf = Shelf()
        self.state: State | None = None
        self.worker: SimWorker | None = None
        self._pending: list[e.Event] = []
        self._backlog: list[Change] = []
        self._told: list[Change] = []
        self._untold: list[Change] = []
        self._incarnation = -1
        self._timer_at: float | None = None
        self.skew_s = random.uniform(-1.0, 1.0) * random.choice((0.2, 0.2, 3.0))
        self.uploader = SimUploader(self)
        world.coordinator.watchers.append(self._watched)

    # --- life --------------------------------------------------------------------------------------------------------

    def power_on(self) -> None:
        """A fresh container: nothing is remembered."""
        self.up, self.exit_code, self.boot = True, None, 0
        self.too_late = any(record.phase is Phase.ENDED for record in self.world.coordinator.history[-1:])
        self.shelf = Shelf()
        self.world.host_changed()
        self._start_agent()

    def power_off(self, for_good: bool = False) -> None:
        """The machine is gone, with everything on it."""
        self.up, self.gone = False, for_good
        self._end_agent()

    def kill_agent(self) -> None:
        """SIGKILL of the agent: workers die with it, init brings it back and keeps the slabs."""
        if not self.up or self.state is None:
            return
        self._end_agent()
        self.boot, life = self.boot + 1, self.life
        self.world.clock.after(
            self.random.uniform(0.2, 0.8), lambda: self._start_agent() if self.life == life else None
        )

    def interrupt(self, delay_s: float = 0.0) -> None:
        """SIGTERM to the container: init passes it on to whichever agent runs."""
        self.world.interrupted.add(self.name)
        deadline = (self.world.interrupted_at or self.world.clock.now) + 110.0
        self.post(e.InterruptionNoticed("sigterm", deadline + self.skew_s), delay_s)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`. init goes on."""
        if self.up and self.state is not None:
            self.frozen = True
            self.world.clock.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen, pending, self._pending = False, self._pending, []
        for event in pending:
            self._decide(event)

    def _start_agent(self) -> None:
        if not self.up:
            return
        self.life += 1
        self.frozen, self._pending, self._backlog, self._timer_at = False, [], [], None
        self._told, self._untold, self.watches_all = [], [], False
        self.endpoints = self.world.known_etcd_hosts()
        job = JobSpec(
            name="job", host=self.name, hosts=self.world.names, node_id=f"{self.name}-{self.life}", boot=self.boot,
            address=self.name, port_base=20000, run=f"{self.name}-{self.life}", strategy="multi_worker",
            python="python", script="train.py", arguments=(), has_store=True, etcd_hosts=self.world.etcd_hosts,
            watch="/checkpoints" if self.world.silent else "",
        )  # fmt: skip
        self.state = initial_state(job, self.world.policy, self.now())
        self._incarnation = -1
        slabs = tuple(self.shelf.slabs.items())
        self.post(e.AgentStarted(slabs, tuple(self.shelf.seals.values()), self.shelf.seen_generation))
        self._resync()
        if self.name in self.world.interrupted:
            self.interrupt(0.1)

    def _end_agent(self) -> None:
        self.life += 1
        self.state = None
        if self.worker is not None:
            self.worker.die()
            self.worker = None

    def now(self) -> float:
        return self.world.clock.now + self.skew_s

    # --- the fold ----------------------------------------------------------------------------------------------------

    def post(self, event: e.Event, delay_s: float = 0.0) -> None:
        """Deliver an event to this incarnation of the agent, if it still lives by then."""
        life = self.life

        def deliver() -> None:
            if self.life == life and self.state is not None:
                if self.frozen:
                    self._pending.append(event)
                else:
                    self._decide(event)

        self.world.clock.after(delay_s, deliver)

    def _decide(self, event: e.Event) -> None:
        if self.state is None:
            return
        decision = self.world.decide(self.state, event, self.now())
        self.world.seen(self, event, decision)
        self.state = decision.state
        for action in decision.actions:
            self._perform(action)
        self.shelf.seen_generation = self.state.seen_generation
        lease = self.state.lease
        self._mind_deadline(None if lease is None else lease.deadline - self.skew_s)
        if self.state.exit_code is not None:
            self.exit_code, self.up = self.state.exit_code, False
            self._end_agent()
            self.world.host_changed()
        else:
            self._set_timer(self.state.wake_at)

    def _set_timer(self, wake_at: float | None) -> None:
        """One timer, for the newest turn's wish; older ones find themselves replaced."""
        if wake_at == self._timer_at:
            return
        self._timer_at, life = wake_at, self.life
        if wake_at is None:
            return

        def fire() -> None:
            if self.life == life and self._timer_at == wake_at:
                self._timer_at = None
                self.post(e.TimerFired())

        self.world.clock.after(wake_at - self.now(), fire)

    def _mind_deadline(self, deadline: float | None) -> None:
        """init enforces the lease's deadline on a clock of its own."""
        if deadline == self.shelf.deadline:
            return
        self.shelf.deadline = deadline
        if deadline is not None:
            shelf = self.shelf
            self.world.clock.after(deadline - self.world.clock.now, lambda: self._enforce(shelf, deadline))

    def _enforce(self, shelf: Shelf, deadline: float) -> None:
        if self.shelf is shelf and shelf.deadline == deadline and self.worker is not None:
            self.worker.killed(9)

    # --- hands -------------------------------------------------------------------------------------------------------

    def _perform(self, action: a.Action) -> None:
        match action:
            case a.GrantLease():
                self._ask(action.operation, lambda: self._grant(action))
            case a.Put():
                self._ask(action.operation, lambda: self._put(action))
            case a.RevokeLease():
                if self._is_heard():
                    self.world.coordinator.revoke(action.lease)
            case a.ForgetRecords():
                self.world.clock.after(self.world.latency_s(self.random), lambda: self._forget(action.prefix))
            case a.UseEtcd():
                self.endpoints = action.hosts
            case a.WatchAll():
                self.watches_all = True
                self._resync()
            case a.JoinEtcd():
                self._join_etcd(action)
            case a.StartStandby():
                stand_by(self, action.standby_id)
            case a.StartWorker():
                self.worker = self.world.make_worker(self, action)
                self.world.worker_started(self, self.worker)
            case a.StopWorker():
                if self.worker is not None and self.worker.spec.worker_id == action.worker_id:
                    self.worker.killed(9, planned=True)
            case a.SignalWorker():
                if self.worker is not None and self.random.random() < 0.5:
                    self.worker.killed(15)
            case a.WriteOrders():
                self.shelf.orders = action
                if self.worker is not None:
                    self.worker.look()
            case a.AllocateSlabs():
                self.shelf.slabs.update(dict.fromkeys(action.slabs, action.size_bytes))
            case a.HandSlabs():
                if self.worker is not None:
                    self.worker.has_slabs = True
            case a.DropSlabs():
                for slab in action.slabs:
                    self.shelf.slabs.pop(slab, None)
                    self.shelf.seals.pop(slab, None)
            case a.ClearSeal():
                self.shelf.seals.pop(action.slab, None)
            case a.SampleEntered() | a.SamplePulse() | a.CollectStacks() | a.CheckHost():
                probe(self, action)
            case _:
                self.uploader.perform(action)

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def _is_heard(self) -> bool:
        return not self.cut and self.world.coordinator.hears(self.name, self.endpoints)

    def _is_answered(self) -> bool:
        return not self.cut and self.world.coordinator.answers(self.name, self.endpoints)

    def _forget(self, prefix: str) -> None:
        if self._is_heard():
            self.world.coordinator.forget(prefix)

    def _join_etcd(self, action: a.JoinEtcd) -> None:
        """Start a member beside the others, in place of one that is lost."""

        def finish() -> None:
            if self.up and self.world.coordinator.join(self.name, action.hosts):
                self.post(e.EtcdJoined(action.operation))
            else:
                self.post(e.OperationFailed(action.operation, "no majority to join", 1.0))

        life = self.life
        self.world.clock.after(self.random.uniform(0.5, 3.0), lambda: finish() if self.life == life else None)

    def _ask(self, operation: str, request: object) -> None:
        """One round trip: the request takes a while, and so does the answer, which may get lost."""
        world, life = self.world, self.life

        def arrive() -> None:
            if not self._is_heard():
                world.clock.after(1.0, lambda: self._failed(operation, life))
                return
            event = request()  # type: ignore[operator]
            if not self._is_answered():
                world.clock.after(1.0, lambda: self._failed(operation, life))
            elif event is not None and self.life == life:
                self.post(event, world.latency_s(self.random))

        world.clock.after(world.latency_s(self.random), arrive)

    def _failed(self, operation: str, life: int) -> None:
        if self.life == life:
            self.post(e.OperationFailed(operation, "coordinator unavailable", 0.2))

    def _grant(self, action: a.GrantLease) -> e.Event:
        sent = self.now()
        lease = self.world.coordinator.grant(action.ttl_s)
        if self._is_answered():
            self._schedule_keepalive(lease, action.ttl_s, self.life)
        if self._incarnation != self.world.coordinator.incarnation:
            self._resync()
        return e.LeaseGranted(lease, sent + action.ttl_s - 2 * self.world.latency_max_s)

    def _schedule_keepalive(self, lease: int, ttl_s: float, life: int) -> None:
        self.world.clock.after(ttl_s / 3, lambda: self._keep_alive(lease, ttl_s, life))

    def _keep_alive(self, lease: int, ttl_s: float, life: int) -> None:
        if self.life != life or self.state is None:
            return
        current = self.state.lease
        if current is not None and current.lease != lease:
            return
        if not self.frozen and self._is_heard():
            sent, known = self.now(), self.world.coordinator.keep_alive(lease, ttl_s)
            if not self._is_answered():
                pass  # it is renewed, and nobody here knows
            elif known:
                self.post(e.LeaseRenewed(lease, sent + ttl_s), self.world.latency_s(self.random))
            else:
                self.post(e.LeaseLost(lease), self.world.latency_s(self.random))
                return
        self._schedule_keepalive(lease, ttl_s, life)

    def _put(self, action: a.Put) -> e.Event:
        coordinator, wanted = self.world.coordinator, (action.record, action.expect, action.lease, action.guard)
        if coordinator.takes(*wanted):
            self.world.check_put(self, action.record)
        revision = coordinator.put(*wanted)
        if revision is None:
            return e.PutRefused(action.operation)
        return e.RecordPut(action.operation, action.record, revision)

    def _resync(self) -> None:
        """Read everything under the prefix, as the watch does when it begins."""
        life, world = self.life, self.world

        def read() -> None:
            if self.life != life:
                return
            if not (self._is_heard() and self._is_answered()):
                world.clock.after(0.5, read)
                return
            self._incarnation = world.coordinator.incarnation
            self._backlog, self._told, self._untold = [], [], []
            found = tuple(each for each in world.coordinator.read() if self._watches(each[0].key))
            self.post(e.ClusterRead(found, self.watches_all))

        world.clock.after(world.latency_s(self.random), read)

    def _watches(self, key: str) -> bool:
        return self.watches_all or not key.startswith(OF_NODES_KEYS)

    def _watched(self, key: str, record: Record | None, revision: int) -> None:
        if self.state is None or self._incarnation != self.world.coordinator.incarnation or not self._watches(key):
            return
        event: Change = e.RecordGone(key, revision) if record is None else e.RecordSeen(record, revision)
        # a watch tells things in their order: what is new waits for what could not be told
        if self.cut or self._backlog or not self.world.coordinator.answers(self.name, self.endpoints):
            self._backlog.append(event)
        else:
            self._tell(event)

    def _tell(self, *events: Change) -> None:
        """Have the agent hear of changes a little later: of all that have come by then, one by one or together."""
        if not self._untold:
            life = self.life
            self.world.clock.after(self.world.watch_latency_s, lambda: self._hear() if self.life == life else None)
        self._told = [*self._told[-_REMEMBERED:], *events]
        self._untold += events

    def _hear(self) -> None:
        told, self._untold = self._untold, []
        together = len(told) > 1 and self.random.random() < _TOGETHER
        for event in [e.RecordsChanged(tuple(told))] if together else told:
            self.post(event)

    def stutter(self) -> None:
        """The watch tells once more what it told a while ago."""
        self._tell(*self._told)

    def mend(self) -> None:
        """The cut is over: what was missed arrives, or everything is read again if the coordinator is another one."""
        self.cut = False
        if self.state is None:
            return
        if self._incarnation != self.world.coordinator.incarnation:
            self._resync()
            return
        backlog, self._backlog = self._backlog, []
        self._tell(*backlog)

    def seal(self, slab: int, step: int) -> None:
        """The worker sealed a slab."""
        self.world.seals += 1
        seal = e.SlabSeal(slab, step, self.world.seals, self.shelf.slabs.get(slab, 100))
        self.shelf.seals[slab] = seal
        if self.worker is not None:
            if self.worker.diverged:
                self.shelf.diverged.add(seal.sequence)
            if self.worker.tears:
                self.shelf.rotten.add(seal.sequence)
            self.post(e.SnapshotSealed(self.worker.spec.worker_id, seal), 0.001)

    def exited(self, worker: SimWorker, planned: bool = False, **how: object) -> None:
        """A worker's process is gone; the agent hears of it unless it is gone itself."""
        self.world.checkers.exited(self, planned)
        seals = tuple(self.shelf.seals.values())
        event = e.WorkerExited(
            worker.spec.worker_id, self.now(), entered=worker.entered, completed=worker.completed, seals=seals
        )
        self.post(replace(event, **how), 0.002)  # type: ignore[arg-type]
        if self.worker is worker:
            self.worker = None
