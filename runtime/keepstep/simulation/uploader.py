"""The uploader of a simulated host: verifies slabs, and moves shares and checkpoints between slabs and the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.records import StoredObject
from keepstep.simulation.silent import SimFiling

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost

_AGAIN_S = 1.0
_FETCHED = 1_000_000
"""Sequence numbers of seals that came from the store begin here."""


class SimUploader:
    """Answers each action after a while: well, or as the faults of the moment have it."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self._filing = SimFiling(host)
        self.wrote = self._filing.wrote

    def perform(self, action: a.Action) -> None:
        """Begin what is asked for; what no uploader does is ignored."""
        random = self._host.random
        match action:
            case a.VerifySlab():
                self._later(action.operation, 0.02, lambda: self._verify(action))
            case a.UploadSnapshot():
                self._remotely(action.operation, random.uniform(0.1, 1.5), lambda: self._upload(action))
            case a.CommitCheckpoint():
                self._remotely(action.operation, 0.1, lambda: self._commit(action))
            case a.ReadHead():
                self._remotely(action.operation, 0.05, lambda: self._read_head(action))
            case a.KeepCharges():
                self._remotely(action.operation, 0.1, lambda: self._keep_charges(action))
            case a.FetchSnapshot():
                self._remotely(action.operation, 0.5, lambda: self._fetch(action))
            case a.SettleFiles():
                self._later(action.operation, 0.02, lambda: self._filing.settle(action))
            case a.KeepFiles():
                self._remotely(action.operation, random.uniform(0.1, 3.0), lambda: self._filing.keep(action))
            case a.PutBackFiles() if action.manifest:
                self._remotely(action.operation, random.uniform(0.1, 1.0), lambda: self._filing.put_back(action))
            case a.PutBackFiles():
                self._later(action.operation, 0.02, lambda: self._filing.put_back(action))
            case a.ProfileWorker():
                self._later(action.operation, 7.0, lambda: e.WorkerProfiled(action.operation, action.worker_id, "kept"))

    def _verify(self, action: a.VerifySlab) -> e.Event:
        seal = self._host.shelf.seals.get(action.slab)
        if seal is None or seal.sequence in self._host.shelf.rotten:
            return e.SnapshotBad(action.operation, action.slab, action.step, "checksum")
        return e.SnapshotVerified(action.operation, action.slab, action.step, self._digest(seal))

    def _upload(self, action: a.UploadSnapshot) -> e.Event:
        seal = self._host.shelf.seals.get(action.slab)
        if seal is None or seal.step != action.step:
            return e.OperationFailed(action.operation, "the slab holds another step", _AGAIN_S)
        item = StoredObject(f"o{action.step}.{action.rank}", "replicated", action.rank, 0, 1, "0")
        digest = self._digest(seal)
        return e.SnapshotUploaded(action.operation, action.generation, action.step, digest, (item,), 0.5)

    def _commit(self, action: a.CommitCheckpoint) -> e.Event:
        store = self._host.world.store
        head = store.commit(action.generation, action.step, action.digest)
        if head is not None:
            self._host.world.check_commit(action.run, action.generation)
        if store.loses_answers and self._host.random.random() < 0.5:
            return e.OperationFailed(action.operation, "no answer", _AGAIN_S)
        if head is None:
            return e.CommitRefused(action.operation, action.generation, action.step)
        return e.CheckpointCommitted(action.operation, action.generation, action.step, head.manifest, 0.1)

    def _read_head(self, action: a.ReadHead) -> e.Event:
        store = self._host.world.store
        if action.claim:
            store.claim(action.claim)
        files = (store.newest_files, store.files_generation) if action.files else ("", 0)
        charges = None if action.claim else store.charges
        return e.HeadRead(action.operation, store.head_without(action.without), *files, charges)

    def _keep_charges(self, action: a.KeepCharges) -> e.Event:
        self._host.world.store.charges = action.charges
        return e.ChargesKept(action.operation, action.charges)

    def _fetch(self, action: a.FetchSnapshot) -> e.Event:
        if action.manifest in self._host.world.store.rotten:
            return e.CheckpointCorrupt(action.operation, action.manifest, "checksum")
        if self._host.worker is not None:
            return e.SnapshotUnwanted(action.operation)
        step = int(action.manifest.rpartition("-")[2])
        shelf = self._host.shelf
        shelf.slabs[action.slab] = 100
        shelf.seals[action.slab] = e.SlabSeal(action.slab, step, _FETCHED + self._host.life, 100)
        return e.SnapshotFetched(action.operation, shelf.seals[action.slab], f"d{step}")

    def _digest(self, seal: e.SlabSeal) -> str:
        mine = f"{self._host.name}:" if seal.sequence in self._host.shelf.diverged else ""
        return f"{mine}d{seal.step}"

    def _remotely(self, operation: str, seconds: float, result: Callable[[], e.Event]) -> None:
        store = self._host.world.store

        def through() -> e.Event:
            if store.refuses:
                return e.StoreRefused(operation, "access denied")
            if store.down:
                return e.OperationFailed(operation, "the store is away", _AGAIN_S)
            return result()

        self._later(operation, seconds, through)

    def _later(self, operation: str, seconds: float, result: Callable[[], e.Event]) -> None:
        host, life = self._host, self._host.life

        def finish() -> None:
            if host.life != life:
                return
            if host.uploader_down:
                host.post(e.OperationFailed(operation, "the uploader is gone", _AGAIN_S))
            else:
                host.post(result())

        host.world.clock.after(seconds, finish)
