"""A simulated worker: starts, joins, restores, steps in lockstep with its world, seals snapshots, drains."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.fingerprints import Fingerprint, WorkerFingerprinted
from keepstep.core.stalls import Activity

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost

SLAB_BYTES = 100


def stand_by(host: SimHost, standby_id: str) -> None:
    """Make the imports of a standby: now and then they fail."""
    life, seconds = host.life, host.random.uniform(1.0, 4.0)
    fails = host.random.random() < 0.1
    event = e.StandbyGone(standby_id, "killed") if fails else e.StandbyReady(standby_id)
    host.world.clock.after(seconds, lambda: host.post(event) if host.life == life else None)


class SimWorker:
    """One worker process of a world of `size` ranks; alive until it dies, exits or is killed.

    Attributes:
        hangs: it enters no step any more.
        moved_at: when it last got on, on the world's clock.
    """

    def __init__(self, host: SimHost, spec: a.StartWorker, random: Random) -> None:
        self.host, self.spec, self.random = host, spec, random
        self.alive, self.joined, self.has_slabs, self.diverged, self.tears = True, False, False, False, False
        self.frozen_until = 0.0
        self.entered = self.completed = 0
        self.size = int(dict(spec.environment)["KEEPSTEP_WORLD_SIZE"])
        self._held = self.stepped = self.hangs = False
        self.moved_at = host.world.clock.now
        self._sealed = -1
        self._looked_at = 0
        host.post(e.WorkerStarted(spec.worker_id, 1))
        host.post(e.WorkerImported(spec.worker_id, "tensorflow"), 0.5)
        self._after(random.uniform(0.2, 0.5) if spec.standby else random.uniform(1.0, 2.5), self._join)

    def _after(self, seconds: float, what: object) -> None:
        self.host.world.clock.after(seconds, lambda: what() if self.alive else None)  # type: ignore[operator]

    def activity(self) -> Activity:
        """What it is about, as far as it says."""
        if not self.joined:
            return Activity.START
        if self.completed >= self.host.world.last_step:
            return Activity.FINISHED
        return Activity.STEP if self.stepped else Activity.FIRST_STEP

    def die(self) -> None:
        """Gone without a report: the agent died, too."""
        self.alive = False
        self.host.world.peer_died(self)

    def killed(self, signal: int, planned: bool = False) -> None:
        """A signal ends the process; `planned` where the agent's core ordered it."""
        if self.alive:
            self.die()
            self.host.exited(self, planned, signal=signal)

    def returns(self) -> None:
        """The script ends without an error, though the others still train."""
        if self.alive:
            self.die()
            self.host.exited(self, exit_code=0)

    def fails(self, error: e.FirstError) -> None:
        """An exception ends the script."""
        if self.alive:
            self.die()
            self.host.exited(self, exit_code=1, error=error)

    def _join(self) -> None:
        self.joined = True
        self.moved_at = self.host.world.clock.now
        orders = self.host.shelf.orders
        step = 0
        if orders is not None and orders.restore_slab >= 0:
            self.host.world.checkers.restores(self.host, orders)
            step = orders.restore_step
        self.entered = self.completed = step
        self.host.post(e.WorkerJoined(self.spec.worker_id, "loop"))
        self.host.post(e.LayoutAnnounced(self.spec.worker_id, 1, SLAB_BYTES))
        self.host.world.restored(self, step)
        self.host.post(e.WorkerRestored(self.spec.worker_id, step, 0.1), 0.1)
        self._after(0.1, self._enter)

    def look(self) -> None:
        """Orders changed: a held worker looks again."""
        if self.alive and self._held:
            self._held = False
            self._enter()

    def _orders(self) -> a.WriteOrders | None:
        orders = self.host.shelf.orders
        return orders if orders is not None and orders.generation == self.spec.generation else None

    def _enter(self) -> None:
        """Publish the step entered, obey `hold`, then wait for the world at the barrier."""
        world = self.host.world
        if world.clock.now < self.frozen_until:
            self._after(self.frozen_until - world.clock.now, self._enter)
            return
        if self.completed >= self.host.world.last_step:
            self.alive = False
            self.host.exited(self, exit_code=0)
            return
        if self.hangs:
            return
        self.moved_at = world.clock.now
        step = self.completed + 1
        self.entered = max(self.entered, step)
        orders = self._orders()
        if orders is not None and orders.hold and (orders.drain_step == 0 or self.completed >= orders.drain_step):
            self._held = True
            return
        if step == world.bug_at_step and self.spec.rank == 0:
            self.fails(e.FirstError("ValueError", "bad batch", self.host.now(), step, False))
            return
        world.at_barrier(self, step)

    def step_done(self, step: int) -> None:
        """All ranks had entered `step`; it is completed."""
        if not self.alive:
            return
        first = not self.stepped
        self.stepped = True
        self.completed = step
        step_s, self.moved_at = self.host.world.clock.now - self.moved_at, self.host.world.clock.now
        self.host.world.completed(self, step)
        if first:
            at = self.host.world.clock.now + self.host.skew_s
            self.host.post(e.FirstStepCompleted(self.spec.worker_id, step, at), 0.05)
        self._sampled(step, step_s)
        orders = self._orders()
        if orders is not None and self._looked_at < orders.fingerprint <= step:
            self._look_at(orders.fingerprint)
        due = orders is not None and orders.snapshot_every > 0 and step % orders.snapshot_every == 0
        last = step == self.host.world.last_step
        drained = orders is not None and orders.hold and step == orders.drain_step
        if due or last or drained:
            self._snapshot(step, must=last or drained)
        else:
            self._enter()

    def _sampled(self, step: int, step_s: float) -> None:
        """Now and then the agent looks at the wire."""
        if step % 4 == 0:
            self.host.post(e.StepsSampled(self.spec.worker_id, self.entered, step, step_s, self.host.world.snapshot_s))

    def _look_at(self, wanted: int) -> None:
        """Tell what this rank has computed in a step, if it is the newest; a host may be wrong in each."""
        self._looked_at = wanted
        value = f"{wanted:x}.{self.spec.rank}" + (".wrong" if self.host.name in self.host.world.wrong else "")
        found = Fingerprint(wanted, value if wanted == self.completed else "")
        self.host.post(WorkerFingerprinted(self.spec.worker_id, found), 0.02)

    def _snapshot(self, step: int, must: bool) -> None:
        orders = self._orders()
        if orders is None or orders.grant in (-1, self._sealed) or not self.has_slabs:
            if must:
                self._after(0.01, lambda: self._snapshot(step, must))
            else:
                self._enter()
            return
        slab = orders.grant
        self.host.world.checkers.overwrites(self.host, slab)
        self.host.shelf.seals.pop(slab, None)
        self._sealed = slab

        def sealed() -> None:
            self.host.seal(slab, step)
            if self.tears:
                self.killed(9)
            self._after(0.005, self._enter)

        self._after(0.01, sealed)
