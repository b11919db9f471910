"""The worker on the stage, and the GPUs that it trains on, as those see them who look whether all is well."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.fingerprints import Fingerprint
from keepstep.core.gpu_events import GpuSample, KeptCordon
from keepstep.core.stalls import Activity, Stall
from keepstep.core.state import State
from keepstep.core.workers import STOPPING
from tests.scenarios.peer import Peer, split_of


class Watched:
    """A worker that gets on, until it stands still."""

    now: float
    entered: int
    state: State
    worker: str
    peer: Peer | None
    happens: Callable[[e.Event], None]
    peer_: Callable[..., None]
    steps: Callable[[str], None]

    def __init__(self) -> None:
        self._doing, self._silent_since = Activity.STEP, None  # type: Activity, float | None
        self._moves_when_looked_at = self.frozen = self.stuck = False
        self._gpus: dict[str, GpuSample] = {}
        self._profiles = True

    def stands_still(self, doing: str = "step", entered: str = "") -> None:
        """The worker gives no sign from now on."""
        self._silent_since, self._doing = self.now, Activity(doing)
        self.entered = int(entered or self.entered)

    def looked_at(self, value: str = "", why: str = "") -> None:
        """The worker has done the step that was to be looked at."""
        assert self.state.orders is not None
        found = Fingerprint(self.state.orders.fingerprint, value, why)
        self.happens(e.WorkerFingerprinted(self.worker, found))

    def goes_on(self) -> None:
        """The worker gets on again."""
        self._silent_since = None

    def goes_on_when_looked_at(self) -> None:
        """It was slow: by the time that its stacks are read, it has moved."""
        self._moves_when_looked_at = True

    def is_frozen(self) -> None:
        """Somebody stops the worker by a signal."""
        self.frozen = True

    def is_stuck(self) -> None:
        """The worker sits in the kernel from now on: it does not go when it is killed."""
        self.stuck = True

    def killing_fails(self) -> None:
        """It was killed for long enough."""
        error = f"{self.worker}: [7] were killed and are still there"
        self.happens(e.OperationFailed(f"{STOPPING}{self.worker}", error))

    def thaw(self) -> bool:
        """Whether it was stopped; the next one is not."""
        frozen, self.frozen = self.frozen, False
        return frozen

    def strains(self, source: str, *strains: str) -> None:
        """Something slows this host down; nothing, where nothing is named."""
        self.happens(e.StrainsChanged(source, strains))

    def works(self, step: str, own_ms: str, part: str = "compute", peer_ms: str = "20") -> None:
        """Two seconds of steps of 100 ms, of which some is this host's own work; the peer's window comes behind."""
        self.now += 1.5
        self.steps(step)
        split = split_of(int(step), float(own_ms), part)
        self.happens(e.StepsSampled(self.worker, int(step) + 1, int(step), 0.1, 0.001, 0.0, (split,)))
        if self.peer is not None:
            self.peer_("works", step, peer_ms)

    def rank_work(self, step: str, *own_ms: str) -> None:
        """The same of each of this host's ranks that mpirun has started; all of the peer's need 20 ms."""
        self.now += 1.5
        self.steps(step)
        splits = tuple(split_of(int(step), float(ms), "compute", rank) for rank, ms in enumerate(own_ms))
        self.happens(e.StepsSampled(self.worker, int(step) + 1, int(step), 0.1, 0.001, 0.0, splits))
        self.peer_("rank_works", step, *("20" for _ in own_ms))

    def divides(self) -> None:
        """The script takes its batches from `run.dataset`, here and on the other host."""
        self.happens(e.WorkerDivides(self.worker))

    def gpu(self, uuid: str, *facts: str) -> None:
        """A GPU of this host has something new to tell, as `xids=[79]`; the rest is as it was."""
        told: dict[str, Any] = {name: json.loads(value) for name, _, value in (fact.partition("=") for fact in facts)}
        told = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
        known = self._gpus.get(uuid, GpuSample(uuid, len(self._gpus)))
        sample = self._gpus[uuid] = replace(known, **{"xids": (), **told})
        self.happens(e.GpusSampled((sample,)))

    def gpus_fall_silent(self) -> None:
        """Their driver does not answer."""
        self.happens(e.GpusSampled((), silent=True))

    def store_lists(self, what: str, by: str, why: str) -> None:
        """An earlier run has left an entry in the store's list of cordons."""
        self.happens(e.CordonsRead((KeptCordon(what, "algo-9", by, why, self.now),)))

    def cannot_be_profiled(self) -> None:
        """Neither py-spy nor TensorFlow does what it should from now on."""
        self._profiles = False

    def _profiled(self, action: a.ProfileWorker) -> e.Event:
        folder, files = f"profiles/step-{action.profile.split.step}-rank-{action.rank}", ("py-spy.speedscope.json",)
        if self._profiles:
            return e.WorkerProfiled(action.operation, action.worker_id, folder, files, ("no TensorFlow profile",))
        return e.WorkerProfiled(action.operation, action.worker_id, "", (), ("no permission", "no TensorFlow profile"))

    def store_refuses_list(self, why: str, what: str = "cordons") -> None:
        """The store takes everything but the list of cordons, or the `charges`."""
        self.happens(e.StoreRefused(what, why))

    def look(self, action: a.SamplePulse | a.CollectStacks | a.ProfileWorker) -> e.Event:
        """What is found."""
        if isinstance(action, a.ProfileWorker):
            return self._profiled(action)
        since = self.now if self._silent_since is None else self._silent_since
        if isinstance(action, a.SamplePulse):
            return e.PulseSampled(action.operation, action.worker_id, self._doing, self.now - since)
        stall = None
        if self._silent_since is not None and not self._moves_when_looked_at:
            calls = ("train.py:12 step",)
            stall = Stall(self._doing, since, self.entered, self.state.completed, in_step=True, calls=calls)
        return e.StacksCollected(action.operation, action.worker_id, stall)
