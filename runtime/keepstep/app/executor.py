"""The hands: performs what the core asked for. An operating error becomes an event; a programming error ends the agent.

Actions that take effect at once are done in the order of their turn. Those that take time run as tasks and answer by
an event that carries their operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from keepstep.adapters.clock import Clock, unix_time
from keepstep.adapters.init_link import InitLink
from keepstep.adapters.processes import ExitStatus, ProcessHost, StopTimeout
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.coordination import Coordination
from keepstep.app.cordoning import keep_cordons
from keepstep.app.first_errors import first_error
from keepstep.app.gpu_memory import GpuMemory
from keepstep.app.launching import Launcher
from keepstep.app.preflight import Preflight
from keepstep.app.probing import Probing
from keepstep.app.sampling import Sampler
from keepstep.app.storing import Storing
from keepstep.app.watching import Watching
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.events import Event, FirstError, SlabSeal
from keepstep.core.splits import Part
from keepstep.core.values import frozen
from keepstep.core.workers import STOPPING
from keepstep.ports import MetricsSink
from keepstep_worker.wire import Progress, Seal

if TYPE_CHECKING:
    from keepstep.app.members import Members

_JOIN_AGAIN_S = 5.0
_STOPS = 11
"""So many times more a process is killed that does not go: two minutes in all. To free a large memory takes a while."""

Post = Callable[[Event], None]


def seal_event(seal: Seal) -> SlabSeal:
    """A seal of the wire as the core knows it."""
    return SlabSeal(seal.slab, seal.step, seal.sequence, seal.size_bytes)


@frozen
class Tools:
    """What the hands work with."""

    coordination: Coordination
    storing: Storing
    watching: Watching
    launcher: Launcher
    probing: Probing
    preflight: Preflight
    sampler: Sampler
    init: InitLink
    metrics: MetricsSink
    clock: Clock
    gpu_memory: GpuMemory
    members: Members | None = None
    """None where there is a single host, which needs no etcd."""


class Executor:
    """One node's hands."""

    def __init__(self, post: Post, tasks: asyncio.TaskGroup, tools: Tools) -> None:
        self._post, self._tasks = post, tasks
        self._launcher, self._storing, self._metrics = tools.launcher, tools.storing, tools.metrics
        self._init, self._clock, self._members = tools.init, tools.clock, tools.members
        self._sampler, self._probing, self._restore_slab = tools.sampler, tools.probing, -1
        self._link: WorkerLink = tools.launcher.link
        self._preflight, self._gpu_memory = tools.preflight, tools.gpu_memory
        self._to_start: dict[str, tuple[asyncio.Task[None], a.StartWorker]] = {}
        coordination, storing, watching = tools.coordination, tools.storing, tools.watching
        self._processes = ProcessHost(self._exited)
        self._slab_lane = asyncio.Lock()
        self._servers: set[str] = set()
        self._perform: dict[type, Callable[[Any], None]] = {
            a.GrantLease: lambda x: self._spawn(coordination.hold_lease(x)),
            a.RevokeLease: lambda x: self._spawn(coordination.revoke(x.lease)),
            a.Put: lambda x: self._spawn(coordination.put(x)),
            a.WatchAll: lambda _: self._spawn(coordination.watch_all()),
            a.ForgetRecords: lambda x: self._spawn(coordination.forget(x)),
            a.StartWorker: self._start,
            a.StartServer: self._serve,
            a.StartStandby: lambda x: self._launcher.start_standby(x, self._processes),
            a.StopWorker: lambda x: self._spawn(self._stop(x.worker_id)),
            a.SignalWorker: self._signal,
            a.WriteOrders: self._order,
            a.SampleEntered: self._sample_entered,
            a.SamplePulse: self._probing.pulse,
            a.CheckHost: lambda x: tools.preflight.begin(x, tasks),
            a.CollectStacks: lambda x: self._spawn(self._probing.collect(x, self._launcher.stacks_file(x.worker_id))),
            a.ProfileWorker: lambda x: self._spawn(self._probing.profiling.perform(x)),
            a.AllocateSlabs: lambda x: self._in_slab_lane(self._allocate(x)),
            a.HandSlabs: lambda x: self._in_slab_lane(self._hand(x)),
            a.DropSlabs: lambda x: self._in_slab_lane(self._drop(x)),
            a.ClearSeal: lambda x: self._link.clear_seal(x.slab),
            a.VerifySlab: lambda x: self._spawn(storing.verify(x, self._link.descriptor(x.slab))),
            a.UploadSnapshot: lambda x: self._spawn(storing.upload(x, self._link.descriptor(x.slab))),
            a.CommitCheckpoint: lambda x: self._spawn(storing.commit(x)),
            a.ReadHead: lambda x: self._spawn(storing.read_head(x)),
            a.FetchSnapshot: lambda x: self._spawn(storing.fetch(x, self._link)),
            a.KeepFiles: lambda x: self._spawn(watching.keep(x)),
            a.SettleFiles: lambda x: self._spawn(watching.settle(x)),
            a.PutBackFiles: lambda x: self._spawn(watching.put_back(x)),
            a.JoinEtcd: lambda x: self._spawn(self._join_etcd(x)),
            a.UseEtcd: lambda x: self._members.use(x.hosts) if self._members is not None else None,
            a.KeepCordons: lambda x: self._spawn(keep_cordons(storing, post, x)),
            a.KeepCharges: lambda x: self._spawn(storing.keep_charges(x)),
            a.SweepStore: lambda x: self._spawn(storing.sweep(x)),
            a.CompareReplicas: self._compare,
            a.Report: self._report,
            a.WriteFailure: lambda x: self._launcher.write_failure(x.text),
        }

    def perform(self, action: a.Action) -> None:
        """Do it, or begin to."""
        self._perform[type(action)](action)

    async def close(self) -> None:
        """Stop what still runs; the job is over."""
        self._preflight.close()
        for waiting, _ in self._to_start.values():
            waiting.cancel()
        self._launcher.standbys.close()
        self._probing.profiling.close()
        try:
            await self._processes.close()
        except StopTimeout as error:
            self._launcher.log(f"{error}")
        await self._gpu_memory.close()
        self._link.hang_up()
        await self._storing.close()

    async def _join_etcd(self, action: a.JoinEtcd) -> None:
        assert self._members is not None, "only jobs that keep an etcd ask for it"
        wrong = await self._members.join(action.leaving, action.hosts)
        event = e.OperationFailed(action.operation, wrong, _JOIN_AGAIN_S) if wrong else e.EtcdJoined(action.operation)
        self._post(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def _in_slab_lane(self, work: Awaitable[None]) -> None:
        """Slabs are made, handed over and dropped in the order in which that was decided."""

        async def in_turn() -> None:
            async with self._slab_lane:
                await work

        self._spawn(in_turn())

    # --- workers -----------------------------------------------------------------------------------------------------

    def _start(self, action: a.StartWorker) -> None:
        freeing = self._gpu_memory.freeing
        if freeing is None:
            self._start_now(action)
        else:
            waiting = self._tasks.create_task(self._start_after(freeing, action.worker_id))
            self._to_start[action.worker_id] = waiting, action

    async def _start_after(self, freeing: asyncio.Task[None], worker_id: str) -> None:
        await asyncio.wait([freeing])
        _, action = self._to_start.pop(worker_id)
        self._start_now(action)

    def _wait_no_longer(self, worker_id: str) -> None:
        """Somebody wants something of a worker: it has to be there for that, even if only to be ended."""
        if worker_id in self._to_start:
            waiting, action = self._to_start.pop(worker_id)
            waiting.cancel()
            self._start_now(action)

    def _start_now(self, action: a.StartWorker) -> None:
        self._sampler.begin(action.worker_id, action.rank, self._restore_slab)
        try:
            process = self._launcher.start(action, self._processes)
        except OSError as error:
            self._link.hang_up()
            first = FirstError("StartFailed", str(error), unix_time(), 0, False)
            self._post(e.WorkerExited(action.worker_id, self._clock.now(), exit_code=127, error=first,
                                      seals=self._seals()))  # fmt: skip
            return
        self._spawn(self._init.group(process.pgid))
        self._post(e.WorkerStarted(action.worker_id, process.pid))

    def _serve(self, action: a.StartServer) -> None:
        try:
            process = self._launcher.start_server(action, self._processes)
        except OSError as error:
            first = FirstError("StartFailed", str(error), unix_time(), 0, False)
            self._post(e.WorkerExited(action.server_id, self._clock.now(), exit_code=127, error=first))
            return
        self._servers.add(action.server_id)
        self._spawn(self._init.group(process.pgid))

    def _signal(self, action: a.SignalWorker) -> None:
        self._wait_no_longer(action.worker_id)
        self._processes.signal(action.worker_id, action.signal)

    async def _stop(self, worker_id: str) -> None:
        self._wait_no_longer(worker_id)
        look = await self._probing.look_last(worker_id)
        if look is not None:
            self._spawn(self._probing.keep(look))
        for last in (*[False] * _STOPS, True):
            try:
                await self._processes.stop(worker_id)
                return
            except StopTimeout as error:
                self._launcher.log(f"{error}")
                if last:
                    self._post(e.OperationFailed(f"{STOPPING}{worker_id}", str(error)))

    def _exited(self, worker_id: str, status: ExitStatus) -> None:
        """A worker is gone: take in what it had still said, and report its end once."""
        if self._launcher.standbys.exited(worker_id, f"ended by {status}"):
            return
        serves = worker_id in self._servers
        self._servers.discard(worker_id)
        progress = Progress()
        if not serves:
            self._link.drain()
            progress = self._link.progress()
        if not serves:
            self._gpu_memory.worker_ended()
        pgid = self._launcher.forget(worker_id)
        if pgid:
            self._spawn(self._init.ungroup(pgid))
        event = e.WorkerExited(
            worker_id,
            self._clock.now(),
            exit_code=status.exit_code,
            signal=status.signal,
            error=first_error(self._launcher.error_file(worker_id), status, unix_time()),
            out_of_memory=status.out_of_memory,
            frozen=status.frozen,
            entered=progress.entered_step,
            completed=progress.completed_step,
            seals=self._seals(),
        )
        if not serves:
            self._link.hang_up()
        self._post(event)

    def _seals(self) -> tuple[SlabSeal, ...]:
        return tuple(seal_event(seal) for seal in self._link.seals())

    def _order(self, action: a.WriteOrders) -> None:
        self._restore_slab = action.restore_slab
        self._link.order(
            generation=action.generation,
            hold=int(action.hold),
            drain_step=action.drain_step,
            grant=action.grant,
            snapshot_every=action.snapshot_every,
            restore_slab=action.restore_slab,
            restore_step=action.restore_step,
            fingerprint=action.fingerprint,
        )

    def _sample_entered(self, action: a.SampleEntered) -> None:
        self._post(e.EnteredSampled(action.operation, action.worker_id, self._link.progress().entered_step))

    # --- slabs -------------------------------------------------------------------------------------------------------

    async def _allocate(self, action: a.AllocateSlabs) -> None:
        for place, slab in enumerate(action.slabs):
            try:
                await self._link.allocate(slab, action.size_bytes)
            except OSError as error:
                self._post(e.SlabsLacking(action.slabs[place:], str(error)))
                return

    async def _hand(self, action: a.HandSlabs) -> None:
        self._link.hand(action.worker_id, action.slabs, action.layout)

    async def _drop(self, action: a.DropSlabs) -> None:
        for slab in action.slabs:
            await self._link.drop(slab)

    def _compare(self, action: a.CompareReplicas) -> None:
        self._metrics.replica_divergence()
        self._spawn(self._storing.compare(action))

    # --- measurements ------------------------------------------------------------------------------------------------

    def _report(self, report: a.Report) -> None:
        metrics, value = self._metrics, report.value
        match report.measure:
            case a.Measure.RESTART:
                metrics.restart(report.label)
            case a.Measure.RECOVERY:
                metrics.recovery(report.label, value)
            case a.Measure.LOST_STEPS:
                metrics.lost_steps(int(value))
            case a.Measure.GENERATION:
                metrics.generation(int(value))
            case a.Measure.DURABLE_STEP:
                metrics.durable_step(int(value))
            case a.Measure.COMMIT_S:
                metrics.commit(value)
            case a.Measure.CHECKPOINT_INTERVAL_S:
                metrics.checkpoint_interval(value)
            case a.Measure.COMMITTABLE:
                metrics.committable(bool(value))
            case a.Measure.STORE_AVAILABLE:
                metrics.store_available(bool(value))
            case a.Measure.STRAGGLER:
                rank, _, part = report.label.partition(":")
                metrics.straggler(int(rank), Part(part), value)
            case a.Measure.STRAGGLER_WAIT_S:
                metrics.straggler_wait(int(report.label), value)
            case a.Measure.SLOW_ONCE:
                metrics.slow_once(int(report.label))
            case a.Measure.PREFLIGHT_FLAW:
                metrics.preflight_flaw(report.label)
            case a.Measure.REPEAT:
                metrics.repeated_step(report.label)
