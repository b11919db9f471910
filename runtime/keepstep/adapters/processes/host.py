"""Workers as processes: started, watched, stopped with all they started, their output passed on.

Nothing is decided here: an exit is reported once, whatever it means.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep import kernel
from keepstep.adapters.processes.oom import OomKills
from keepstep.adapters.processes.output import LineSink, OutputPump, standard_sinks
from keepstep.adapters.processes.starting import Child, Pumps, Started, WorkerSpec, discard, is_dead, launch
from keepstep.core.values import evolve, frozen

DRAIN_S = 2.0
"""How long an exit waits for the worker's last output, where the reader of ours is slow."""
STOP_S = 10.0
"""How long a killed process may take to go: freeing a large memory takes time, a hanging driver takes for ever."""
RETRY_S = 0.01
"""How soon to look again where the kernel has no pidfd to wait for."""
AGE_S = 5.0
"""How often to look where the processes are; nobody dies of a lack of memory twice as long after the kernel killed."""
_KILLED = 128 + signal.SIGKILL


@frozen
class ExitStatus:
    """How a worker ended: by a code or by a signal, the other is None.

    Attributes:
        out_of_memory: the kernel had to kill somebody.
        frozen: it was stopped by a signal when it was told to end.
        last_words: the end of what it wrote to standard error.
    """

    exit_code: int | None
    signal: int | None
    out_of_memory: bool = False
    frozen: bool = False
    last_words: str = ""

    def __str__(self) -> str:
        return f"exit code {self.exit_code}" if self.signal is None else f"signal {self.signal}"


class StopTimeout(Exception):
    """A killed process is still there: it hangs in the kernel, and runs no instruction of its own any more."""

    retryable = False
    hint = "a driver or a file system does not let the process go; the host needs a restart"


@dataclass(eq=False)
class WorkerProcess:
    """A worker that was started and whose exit has not been reported."""

    worker_id: str
    pid: int
    process: Child = field(repr=False)
    pumps: Pumps = field(repr=False)
    reported: asyncio.Future[ExitStatus] = field(repr=False)
    pidfd: int = -1
    prefix: bytes = b""
    held: bool = False
    frozen: bool = False
    undrained: int = 2
    status: ExitStatus | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def pgid(self) -> int:
        """The worker leads a session and a process group of its own."""
        return self.pid


class ProcessHost:
    """The workers of this agent. Everything runs in the event loop, which must be the main thread's."""

    def __init__(
        self,
        on_exit: Callable[[str, ExitStatus], None],
        *,
        sinks: tuple[LineSink, LineSink] | None = None,
        pidfd: bool | None = None,
    ) -> None:
        """Make a host without workers; call it in the running loop.

        Args:
            on_exit: told once of each worker's end, after its output was passed on (waited for DRAIN_S at the most).
            sinks: where standard output and standard error of the workers go; this process's own by default.
            pidfd: whether to watch by pidfd; found out by default. Without, this takes over SIGCHLD of the loop.
        """
        self._on_exit = on_exit
        self._sinks = sinks or standard_sinks()
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, WorkerProcess] = {}
        self._lingering: list[OutputPump] = []
        self._oom_kills = OomKills()
        self._aging = self._loop.call_later(AGE_S, self._age)
        self._pidfd = _has_pidfd() if pidfd is None else pidfd
        if not self._pidfd:
            self._loop.add_signal_handler(signal.SIGCHLD, self._look)

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker in a session of its own.

        Raises:
            OSError: the command can not be started.
            ValueError: a worker of this id runs already.
        """
        if spec.worker_id in self._workers:
            raise ValueError(f"{spec.worker_id} runs already")
        return self.adopt(spec, launch(spec, self._sinks))

    def adopt(self, spec: WorkerSpec, started: Started) -> WorkerProcess:
        """Watch over a child of this process that is there already, as the worker that it is by now.

        Raises:
            ValueError: a worker of this id runs already.
        """
        if spec.worker_id in self._workers:
            raise ValueError(f"{spec.worker_id} runs already")
        process, pumps, prefix = started.process, started.pumps, spec.prefix.encode()
        if started.held and not spec.held:
            self._release(pumps, prefix)
        reported = self._loop.create_future()
        worker = WorkerProcess(spec.worker_id, process.pid, process, pumps, reported, prefix=prefix, held=spec.held)
        self._workers[spec.worker_id] = worker
        _offer_to_the_oom_killer(worker.pid, spec.oom_score_adj)
        self._oom_kills.follow(worker.pid)
        if self._pidfd:
            worker.pidfd = os.pidfd_open(worker.pid)
            self._loop.add_reader(worker.pidfd, self._ended, worker)
        return worker

    def rename(self, worker_id: str, spec: WorkerSpec) -> WorkerProcess | None:
        """Have a held process be another worker from now on, and pass its output on; None where it has ended.

        Args:
            worker_id: what it was started as.
            spec: the worker that it is now; its command and environment are the caller's to hand over.
        """
        worker = self._workers.get(worker_id)
        if worker is None or not worker.held or is_dead(worker.pid):
            return None
        del self._workers[worker_id]
        worker.worker_id, worker.held = spec.worker_id, False
        self._workers[spec.worker_id] = worker
        _offer_to_the_oom_killer(worker.pid, spec.oom_score_adj)
        self._release(worker.pumps, spec.prefix.encode())
        return worker

    def signal(self, worker_id: str, number: int) -> None:
        """Send a signal to a worker's process group; nothing happens where it has ended."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.status is None:
            kernel.kill_group(worker.pgid, number)

    async def stop(self, worker_id: str, timeout_s: float = STOP_S) -> None:
        """Kill a worker and all that descends from it; return when all are gone and the exit was reported.

        A process that left the session and lost its parents is not found here: init sweeps it.

        Raises:
            StopTimeout: some of them did not go.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        doomed: set[int] = set()
        worker.frozen = kernel.is_frozen(worker.pid)
        try:
            async with asyncio.timeout(timeout_s):
                doomed = _live_kin(worker.pgid)
                self.signal(worker_id, signal.SIGKILL)
                while doomed:
                    for pid in doomed:
                        kernel.kill(pid)
                    for pid in sorted(doomed):
                        await self._gone(pid)
                    doomed = _live_kin(worker.pgid)  # what they had started meanwhile
                await asyncio.shield(worker.reported)
        except TimeoutError as error:
            raise StopTimeout(f"{worker_id}: {sorted(doomed)} were killed and are still there") from error

    async def close(self, timeout_s: float = STOP_S) -> None:
        """Stop every worker and the threads that pass output on, waiting `timeout_s` for each at the most.

        Raises:
            StopTimeout: some process did not go.
        """
        try:
            for worker_id in list(self._workers):
                await self.stop(worker_id, timeout_s)
        finally:
            self._aging.cancel()
            for pump in self._lingering:
                pump.close()
            for pump in self._lingering:
                await asyncio.to_thread(pump.join, timeout_s)
            self._lingering.clear()
            if not self._pidfd:
                self._loop.remove_signal_handler(signal.SIGCHLD)

    # --- exits -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for worker in list(self._workers.values()):
            if worker.status is None:
                self._ended(worker)

    def _age(self) -> None:
        self._oom_kills.age()
        self._aging = self._loop.call_later(AGE_S, self._age)

    def _ended(self, worker: WorkerProcess) -> None:
        """A worker may have ended: take its status, and have its last output passed on."""
        if not is_dead(worker.pid):
            return
        kernel.kill_group(worker.pgid)  # before it is reaped: until then the number is its own
        for pid in _live_kin(worker.pgid):
            kernel.kill(pid)
        out_of_memory = self._oom_kills.strike(worker.pid)
        code = worker.process.wait()
        killed = code in (-signal.SIGKILL, _KILLED) and out_of_memory  # a shell tells of its child by such a code
        worker.status = ExitStatus(code, None, killed) if code >= 0 else ExitStatus(None, -code, killed, worker.frozen)
        if worker.pidfd >= 0:
            self._loop.remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        if worker.held:
            self._let_go(worker, failed=code > 0)
        worker.timer = self._loop.call_later(DRAIN_S, self._report, worker)
        for pump in worker.pumps:
            pump.drain(lambda: self._in_loop(worker))

    def _let_go(self, worker: WorkerProcess, failed: bool) -> None:
        """A held process has ended: what it said matters where it failed by itself."""
        if failed:
            self._release(worker.pumps, worker.prefix)
        else:
            discard(worker.pumps)

    def _release(self, pumps: Pumps, prefix: bytes) -> None:
        for pump, sink in zip(pumps, self._sinks, strict=True):
            pump.release(prefix, sink)

    def _in_loop(self, worker: WorkerProcess) -> None:
        """A pump's thread says that it has passed everything on."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._drained, worker)

    def _drained(self, worker: WorkerProcess) -> None:
        worker.undrained -= 1
        if worker.undrained == 0:
            self._report(worker)

    def _report(self, worker: WorkerProcess) -> None:
        if worker.reported.done() or worker.status is None:
            return
        if worker.timer is not None:
            worker.timer.cancel()
        del self._workers[worker.worker_id]
        self._lingering = [pump for pump in (*self._lingering, *worker.pumps) if not pump.join(0)]
        worker.status = evolve(worker.status, last_words=worker.pumps[1].last_words)
        worker.reported.set_result(worker.status)
        self._on_exit(worker.worker_id, worker.status)

    async def _gone(self, pid: int) -> None:
        """Wait until a killed process has died."""
        if self._pidfd:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    gone = self._loop.create_future()
                    self._loop.add_reader(fd, _resolve, gone)
                    await gone
                finally:
                    self._loop.remove_reader(fd)
                    os.close(fd)
            return
        while kernel.is_alive(pid):
            moment = self._loop.create_future()
            self._loop.call_later(RETRY_S, _resolve, moment)
            await moment


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _live_kin(pgid: int) -> set[int]:
    """Whoever is alive in a worker's session or group, and all that descends from those."""
    table = {pid: process for pid, process in kernel.processes().items() if not process.zombie}
    roots = [pid for pid, process in table.items() if pgid in (pid, process.session, process.group)]
    return kernel.family(table, roots)


def _offer_to_the_oom_killer(pid: int, more: int) -> None:
    # gone already, or not permitted: it is an advice to the kernel
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj") as own:
        with open(f"/proc/{pid}/oom_score_adj", "w") as its:
            its.write(str(min(1000, int(own.read()) + more)))


def _has_pidfd() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False
