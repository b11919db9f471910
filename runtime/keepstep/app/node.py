"""One node: put the parts together, run the loop, exit with the job's code."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.adapters.clock import Clock, process_age_s, sleep
from keepstep.adapters.coordinator_memory import MemoryCoordinator
from keepstep.adapters.host_metrics import HostMetrics
from keepstep.adapters.init_link import InitLink
from keepstep.adapters.journal import JournalWriter
from keepstep.adapters.processes import LineQueue
from keepstep.adapters.prometheus import Metrics
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.accounting import Accounting
from keepstep.app.coordination import Coordination
from keepstep.app.cordoning import recall_cordons
from keepstep.app.executor import Executor, Tools, seal_event
from keepstep.app.forerunner import Forerunner
from keepstep.app.gpu_memory import GpuMemory
from keepstep.app.gpus import GpuWatch
from keepstep.app.host_health import watch_host
from keepstep.app.intermediate import Intermediate
from keepstep.app.launching import Launcher
from keepstep.app.notices import watch_notices, watch_runtime
from keepstep.app.places import Places
from keepstep.app.preflight import Preflight
from keepstep.app.probing import Probing
from keepstep.app.sampling import Sampler
from keepstep.app.setting_up import Setup, deaf_process
from keepstep.app.standing_by import Standbys
from keepstep.app.storing import Storing, local_folder
from keepstep.app.supervisor import Supervisor
from keepstep.app.watching import Watching
from keepstep.core import events as e
from keepstep.core.causes import FailureCause
from keepstep.core.policy import Policy
from keepstep.core.state import State
from keepstep.errors import ConfigError
from keepstep.ports import Coordinator

if TYPE_CHECKING:
    from keepstep.app.several import Several

_SENSORS_AFTER_S = 0.3
_SOURCES = {signal.SIGTERM: "sigterm", signal.SIGINT: "sigint", signal.SIGHUP: "sighup"}


class Agent:
    """One node's parts, put together."""

    def __init__(self, setup: Setup, init: InitLink, lines: LineQueue, forerunner: Forerunner | None) -> None:
        self._init, self._lines, self._forerunner = init, lines, forerunner
        self._several = join_others(setup, init, self.log) if len(setup.job.hosts) > 1 else None
        port = 0 if self._several is None else self._several.port
        self._setup = replace(setup, job=replace(setup.job, peer_port=port))
        self._clock = Clock()
        self._deadline: float | None = None
        self._memo: tuple[int, int] | None = None
        self._accounting = Accounting(setup.job.host, setup.places.output, self._clock)

    def log(self, text: str) -> None:
        """One line for people; never waits."""
        self._lines.post(f"keepstep {self._setup.job.host} | {text}".encode())

    def _introduce(self, port: int) -> None:
        """Say who this is."""
        job, deaf = self._setup.job, deaf_process(self._setup.contract.paths)
        self.log(f"node {job.node_id}, rank table of {len(job.hosts)} hosts, metrics on port {port}")
        if job.host in job.feeders:
            self.log("this host trains nothing: it runs tf.data's service for those that do")
        elif job.host in job.idle:
            self.log("this host's instance group has no part in the training: it waits for the end of the job")
        if deaf:
            self.log(f"process 1 is {deaf} and passes no SIGTERM on: a stop saves nothing; start me by `exec keepstep`")

    async def run(self) -> int:
        """Run until the node is finished.

        Raises:
            KeepstepError: something that the job can not do without is not to be had.
        """
        setup, job, policy = self._setup, self._setup.job, self._setup.policy
        metrics = open_metrics(policy, setup.places.scratch)
        metrics.store_available(setup.store is not None)  # until something is asked of it in vain
        self._accounting.begin(os.getppid(), self._init.state.memo)
        journal = open_journal(setup.places, metrics, self.log)
        supervisor = Supervisor(job, policy, self._clock, journal, self.log)
        self._init.listen(on_fenced=self._fenced, on_companion_exited=self._companion_exited)
        self._init.listen_signals(lambda number: self._signalled(supervisor, number))
        several = self._several
        coordinator: Coordinator = (
            MemoryCoordinator(self._clock.monotonic) if several is None else await several.open(job)
        )
        link = WorkerLink(self._init, self._init.state.kept, lambda *said: sampler.on_message(*said))
        await link.open()
        standbys = Standbys(job.host, supervisor.post, self._forerunner)
        sampler = Sampler(link, self._clock, metrics, supervisor.post, standbys.learn)
        launcher = make_launcher(setup, link, standbys, self.log)
        coordination = Coordination(coordinator, job.name, self._clock, supervisor.post, self.log)
        local = local_folder(policy.checkpoint.local, setup.contract)
        storing = Storing(job.name, setup.store, policy, supervisor.post, self.log, local)
        watching = Watching(job, setup.places.scratch, storing, supervisor.post, self.log)
        probing = Probing(link, sampler, storing, setup.places.output, supervisor.post, self.log)
        preflight, memory = Preflight(setup, storing, supervisor.post, self.log), GpuMemory(self.log)
        if several is not None:
            several.give(storing, link.wire_fd)
        supervisor.post(self._started(link))
        self._introduce(metrics.port)
        intermediate = await begin_output(setup, self.log)
        async with asyncio.TaskGroup() as tasks:
            tools = Tools(
                coordination, storing, watching, launcher, probing, preflight, sampler, self._init, metrics,
                self._clock, memory, None if several is None else several.members,
            )  # fmt: skip
            executor = Executor(supervisor.post, tasks, tools)
            heard = watch_notices(policy.interruption, storing, self._clock, supervisor.post)
            machine = self._watch_machine(local, metrics, memory, supervisor.post)
            sensors = coordination.watch(), storing.run(), sampler.run(), *machine, heard, watching.run()
            background: list[asyncio.Task[Any]] = [tasks.create_task(sensor) for sensor in sensors]
            background += [] if several is None else several.keep(tasks)
            self._revoke_former(coordination, tasks)
            remembers = self._accounting.keep(storing.ask_store), recall_cordons(storing, supervisor.post)
            background += [tasks.create_task(each) for each in remembers]
            code = await supervisor.run(executor.perform, lambda *turn: self._follow(turn, watching, tasks, metrics))
            metrics.up(False)
            await self._leave(supervisor.state, storing)
            await executor.close()
            await intermediate.finish()
            for task in background:
                task.cancel()
            await coordination.finish()
        await coordinator.close()
        journal.close()
        self._account(code)
        return code

    def _watch_machine(
        self, local: str, metrics: Metrics, memory: GpuMemory, post: Callable[[e.Event], None]
    ) -> tuple[Coroutine[Any, Any, None], ...]:
        """The sensors of this host's GPUs, of the host itself, and of how long it may run."""
        host = watch_host(written_folders(self._setup, local), HostMetrics(metrics.registry), post, self.log)
        gpus = GpuWatch(self._setup.policy, metrics, memory, post, self.log)
        is_lone = len(self._setup.job.hosts) == 1
        age_s = process_age_s(os.getppid())
        ending = watch_runtime(self._setup.policy.interruption, age_s, self._clock, post)
        return begin_later(gpus.run) if is_lone else gpus.run(), host.run(), ending

    def _account(self, code: int) -> None:
        """The last words."""
        self._accounting.write()
        self.log(f"exit {code}")

    def _started(self, link: WorkerLink) -> e.AgentStarted:
        """What this agent finds of the one before."""
        slabs, seals = tuple(sorted(link.slabs.items())), tuple(map(seal_event, link.seals()))
        return e.AgentStarted(slabs, seals, int(self._init.state.memo.get("seen_generation", 0)))

    def _revoke_former(self, coordination: Coordination, tasks: asyncio.TaskGroup) -> None:
        """Let go of the lease of the agent before this one, so that nobody waits for its end."""
        lease = self._init.state.memo.get("lease")
        if lease:
            tasks.create_task(coordination.revoke(int(lease)))

    async def _leave(self, state: State, storing: Storing) -> None:
        """What is left in the store at the end, or taken from there."""
        if self._several is not None:
            await self._several.end(state, storing)
        if storing.has_store:
            await self._accounting.remember(storing.ask_store)

    def _follow(
        self, turn: tuple[State, e.Event, float], watching: Watching, tasks: asyncio.TaskGroup, metrics: Metrics
    ) -> None:
        """After each turn: init learns the lease's deadline, and what the next agent is to know."""
        state, _, now = turn
        watching.follow(state, now)
        due = self._accounting.follow(*turn)
        if due:
            metrics.goodput(self._accounting.seconds())
        deadline = None if state.lease is None else state.lease.deadline
        if deadline != self._deadline:
            self._deadline = deadline
            at = None if deadline is None else self._clock.to_monotonic(deadline)
            tasks.create_task(self._init.deadline(at))
        memo = (state.seen_generation, 0 if state.lease is None else state.lease.lease)
        if memo != self._memo or due:
            self._memo = memo
            kept = {"seen_generation": memo[0], "lease": memo[1], "account": self._accounting.memo()}
            tasks.create_task(self._init.memo(kept))

    def _signalled(self, supervisor: Supervisor, number: int) -> None:
        source = _SOURCES.get(signal.Signals(number))
        if source is not None:
            deadline = self._clock.now() + self._setup.policy.interruption.grace
            supervisor.post(e.InterruptionNoticed(source, deadline))

    def _fenced(self) -> None:
        self.log("the lease ran out: init has stopped the workers")

    def _companion_exited(self, name: str, status: int) -> None:
        if self._several is not None:
            self._several.companion_exited(name, status)


async def begin_later(sensor: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run what would slow a lone host's start down, and tells nothing that it has to wait for."""
    await sleep(_SENSORS_AFTER_S)
    await sensor()


def written_folders(setup: Setup, local: str) -> tuple[str, ...]:
    """Whose disks the job can not do without."""
    places = setup.places
    return str(places.scratch), str(places.output), str(setup.contract.paths.checkpoints), local


async def begin_output(setup: Setup, log: Callable[[str], None]) -> Intermediate:
    """Have what the script leaves for the platform uploaded as it comes, where that is asked for.

    Raises:
        ConfigError: what is asked for can not be used.
    """
    made = Intermediate(setup.contract, setup.environment, setup.places.scratch, log)
    await made.begin()
    return made


def join_others(setup: Setup, init: InitLink, log: Callable[[str], None]) -> Several:
    """Load what only a job of several hosts needs, and begin with it."""
    from keepstep.app.several import Several

    return Several(setup, init, log)


def make_launcher(setup: Setup, link: WorkerLink, standbys: Standbys, log: Callable[[str], None]) -> Launcher:
    """Lay out what workers are started with.

    Raises:
        ConfigError: the scratch folder can not be used.
    """
    try:
        return Launcher(setup.job.host, setup.environment, setup.places, link=link, standbys=standbys, log=log)
    except OSError as error:
        raise unusable_scratch(error) from error


def unusable_scratch(error: OSError) -> ConfigError:
    return ConfigError(str(error), "a folder that can be written", key="--scratch-dir")


def open_metrics(policy: Policy, scratch: Path) -> Metrics:
    """Serve /metrics, and leave the address in the scratch folder, for `entrypoints/healthcheck`.

    Raises:
        ConfigError: the address can not be listened on, or the folder can not be written.
    """
    host, _, port = policy.telemetry.listen.rpartition(":")
    try:
        metrics = Metrics(host, int(port), [cause.value for cause in FailureCause])
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{policy.telemetry.listen}: {error}", "an address that is free, or port 0", key="telemetry.listen"
        ) from error
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "metrics.new").write_text(f"{host}:{metrics.port}", encoding="utf-8")
        (scratch / "metrics.new").replace(scratch / "metrics")
    except OSError as error:
        raise ConfigError(
            f"{scratch}: {error.strerror}", "a folder that can be written", key="--scratch-dir"
        ) from error
    return metrics


def open_journal(places: Places, metrics: Metrics, log: Callable[[str], None]) -> JournalWriter:
    """Begin the journal beside the job's output; in the scratch folder where that can not be written.

    Raises:
        ConfigError: it can be written in neither.
    """
    alarms = iter((True,))

    def on_dropped(why: str) -> None:
        metrics.journal_dropped(1)
        if next(alarms, False):
            log(f"the journal can not be written, a replay will have a gap: {why}")

    try:
        return JournalWriter(places.output / "journal.jsonl", on_dropped=on_dropped)
    except OSError as error:
        log(f"{places.output} can not be written ({error}); the journal goes to {places.scratch}")
        try:
            return JournalWriter(places.scratch / "journal.jsonl", on_dropped=on_dropped)
        except OSError as second:
            raise unusable_scratch(second) from second
