"""The hosts of a health simulation that have a fold: their GPUs are told of, and where the time of their steps goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.gpu_events import CordonsKept, CordonsRead, GpuSample, GpusSampled
from keepstep.core.records import OF_NODES_KEYS, GenerationRecord, Record
from keepstep.core.splits import Split, Window, added
from keepstep.simulation.checkers import Checkers
from keepstep.simulation.fakes import FakeCoordinator
from keepstep.simulation.host import SimHost
from keepstep.simulation.worker import SimWorker

if TYPE_CHECKING:
    from keepstep.simulation.health import HealthWorld

LASTS_S = 1e8
"""How long a lease lasts here: nobody loses one."""
_SAMPLE_STEPS = 5


class HealthHost(SimHost):
    """A host with a fold, whose lease nobody takes away, and which hears at one go what comes together."""

    def _grant(self, action: a.GrantLease) -> e.Event:
        sent = self.now()
        return e.LeaseGranted(self.world.coordinator.grant(LASTS_S), sent + LASTS_S)

    def _hear(self) -> None:
        told, self._untold = self._untold, []
        if told:
            self.post(told[0] if len(told) == 1 else e.RecordsChanged(tuple(told)))

    def _start_agent(self) -> None:
        super()._start_agent()
        world: HealthWorld = self.world  # type: ignore[assignment]
        listed = tuple(world.ledger.listed.values())
        if listed:
            self.post(CordonsRead(listed))
        self.post(GpusSampled((GpuSample(world.gpu_of(self.name), 0, ecc_uncorrected=0, temperature_c=60.0),)))

    def _perform(self, action: a.Action) -> None:
        if not isinstance(action, a.KeepCordons):
            super()._perform(action)
            return
        world: HealthWorld = self.world  # type: ignore[assignment]
        world.ledger.listed.update({entry.what: entry for entry in action.cordons})
        self.post(CordonsKept(action.operation), 0.1)

    def hears(self, records: Iterable[Record]) -> None:
        """Records of others that nobody but a leader watches."""
        coordinator, told = self.world.coordinator, []
        for record in records:
            coordinator.revision += 1
            told.append(e.RecordSeen(record, coordinator.revision))
        self._tell(*told)


class HealthWorker(SimWorker):
    """A worker whose steps are timed."""

    total = Split(0, 0, 0.0, 0.0, 0.0, 0.0)
    newest = total

    def _sampled(self, step: int, step_s: float) -> None:
        """What the agent reads of the wire: a mean of the newest steps."""
        self.total = added(Window(0, 0.0, self.total), self.newest).total
        if step % _SAMPLE_STEPS == 0:
            world = self.host.world
            splits, snapshot_s = (self.total,), world.snapshot_s
            self.host.post(e.StepsSampled(self.spec.worker_id, self.entered, step, step_s, snapshot_s, splits=splits))
            self.total = Split(step, 0, 0.0, 0.0, 0.0, 0.0)


class HealthCoordinator(FakeCoordinator):
    """Only leaders are told what nodes say of themselves."""

    def _tell(self, key: str, record: Record | None) -> None:
        for watcher in self.watchers:
            host = getattr(watcher, "__self__", None)
            if not key.startswith(OF_NODES_KEYS) or not isinstance(host, SimHost) or host.watches_all:
                watcher(key, record, self.revision)


class HealthCheckers(Checkers):
    """What must hold of the hosts that have a fold."""

    def put(self, host: SimHost, record: GenerationRecord) -> None:
        """Its members are mostly of the crowd, whose slabs nobody can look into."""
