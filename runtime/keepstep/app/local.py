"""`keepstep local`: N whole agents on this machine, each with a base directory, ports and an init of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from keepstep import kernel
from keepstep.adapters.clock import monotonic, sleep, unix_time
from keepstep.adapters.etcd_member import discard_data_dir
from keepstep.app.faults import PlannedFault, kill_family, uploader_of
from keepstep.app.summary import printed_values, read_goodput, summarize
from keepstep.core.job import PORT_SPAN
from keepstep.core.values import frozen
from keepstep.errors import ConfigError, QuorumError
from keepstep.intake.contract import read_environment

_TICK_S = 0.1
_PROGRESS_S = 2.0
_PORTS_FROM, _PORT_BLOCKS = 20_000, 24
_PORTS = Path("/tmp/keepstep-ports")
"""A file for each block, locked by the run that uses it; it says where the data of that host's etcd is noted."""
_ETCD_PORTS_FROM, _ETCD_PORTS_TO = 32_000, 32_768
"""Below those that the kernel gives to whoever asks for any: between looking and listening nobody else gets them."""
_RETURN_S = 1.0
"""How long a host that was killed stays away."""
_LINE_BYTES_MAX = 1 << 24


@frozen
class LocalRun:
    """What to run: see the options of `keepstep local`."""

    hosts: int
    script: str
    arguments: tuple[str, ...]
    policy: str
    overrides: tuple[str, ...]
    store: str
    folder: Path
    faults: tuple[PlannedFault, ...]
    quiet: bool
    wrap: tuple[str, ...] = ()
    """A command that runs each host as its child, and what it is given first: a PID namespace, a resource limit."""


@dataclass
class _Host:
    """One local host: its files, its process, and what its journal has told so far."""

    name: str
    folder: Path
    port_base: int
    etcd_port: int
    process: asyncio.subprocess.Process | None = None
    exit_code: int | None = None
    worker_pid: int = 0
    agent_pid: int = 0
    step: int = 0
    generation: int = 0
    restarts: int = 0
    durable: int = 0
    wall_s: float = 0.0
    _journal: IO[str] | None = None
    _inode: int = 0

    @property
    def output(self) -> Path:
        return self.folder / "output" / "data" / "keepstep" / self.name

    @property
    def journal(self) -> Path:
        return self.output / "journal.jsonl"

    def look(self) -> None:
        """Take in what the journal says by now; a new agent begins a new file."""
        with contextlib.suppress(OSError):
            inode = self.journal.stat().st_ino
            if self._journal is None or inode != self._inode:
                newer = self.journal.open(encoding="utf-8")
                self._drain()
                self.close()
                self._journal, self._inode = newer, inode
        self._drain()

    def close(self) -> None:
        """Close what is read of it."""
        if self._journal is not None:
            self._journal.close()

    def _drain(self) -> None:
        if self._journal is None:
            return
        while True:
            at = self._journal.tell()
            line = self._journal.readline()
            if not line.endswith("\n"):
                self._journal.seek(at)
                return
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        self.agent_pid = line.get("pid", self.agent_pid)
        event = line.get("event", {})
        for change in event.get("changes", (event,)):
            self._hear(change)

    def _hear(self, event: dict[str, Any]) -> None:
        match event.get("kind"):
            case "worker_started":
                self.worker_pid = event["pid"]
            case "steps_sampled":
                self.step = max(self.step, event["completed"])
            case "worker_exited":
                self.worker_pid = 0
            case "record_seen" | "record_put" if event["record"]["kind"] == "generation":
                record = event["record"]
                self.generation, self.restarts = record["number"], record["restarts"]
                self.durable = record["durable_step"]


@dataclass
class Local:
    """One run; `run()` plays it."""

    plan: LocalRun
    hosts: list[_Host] = field(default_factory=list)
    inflicted: list[tuple[str, float]] = field(default_factory=list)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _stopping: bool = False

    async def run(self) -> int:
        """Run the job to its end and write `summary.json`; return the first exit code that is not 0.

        Raises:
            ConfigError: the folder can not be used.
            QuorumError: no ports are free.
        """
        with self._files:
            return await self._run()

    async def _run(self) -> int:
        self._prepare()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._forward, number)
        async with asyncio.TaskGroup() as tasks:
            for host in self.hosts:
                tasks.create_task(self._keep(host))
            tasks.create_task(self._watch(tasks))
        self._discard_etcd_data()
        codes = {host.name: host.exit_code if host.exit_code is not None else 70 for host in self.hosts}
        self._write_summary(codes)
        return next((code for code in codes.values() if code), 0)

    def _prepare(self) -> None:
        names = [f"algo-{number}" for number in range(1, self.plan.hosts + 1)]
        hosts_folder = self.plan.folder / "hosts"
        self._discard_etcd_data()  # of a run in this folder that was killed
        try:
            _PORTS.mkdir(mode=0o777, exist_ok=True)
            _discard_data_of_the_killed()
            shutil.rmtree(hosts_folder, ignore_errors=True)
            for name in names:
                base = hosts_folder / name
                (base / "input" / "config").mkdir(parents=True)
                contract = {"current_host": name, "hosts": names, "network_interface_name": "lo"}
                (base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(contract))
                (base / "input" / "config" / "hyperparameters.json").write_text("{}")
                (base / "input" / "config" / "inputdataconfig.json").write_text("{}")
                block = self._port_block((base / "scratch").resolve())
                host = _Host(name, base, _PORTS_FROM + block * PORT_SPAN, etcd_port(block))
                self._files.callback(host.close)
                self.hosts.append(host)
        except OSError as error:
            raise ConfigError(str(error), "a folder that can be written", key="--out") from error

    def _port_block(self, scratch: Path) -> int:
        """A block of ports that no other run on this machine uses; whoever finds its lock free clears up `scratch`."""
        for block in range(_PORT_BLOCKS):
            lock = _lock(_PORTS / str(block))
            if lock is None:
                continue
            self._files.enter_context(lock)
            _note(lock, os.fsencode(scratch))
            return block
        raise QuorumError(f"all {_PORT_BLOCKS} blocks of ports are taken", "end other local runs first")

    def _discard_etcd_data(self) -> None:
        """Give back the memory that etcd's data takes: on a machine of its own it would go with the container."""
        for scratch in (self.plan.folder / "hosts").glob("*/scratch"):
            discard_data_dir(scratch)

    # --- hosts -------------------------------------------------------------------------------------------------------

    async def _keep(self, host: _Host) -> None:
        """Run a host until it exits; one that was killed as a machine is comes back, unless the others are done."""
        while True:
            code = await self._boot(host)
            if code == -signal.SIGKILL and not self._stopping:
                await sleep(_RETURN_S)
                others = [other for other in self.hosts if other is not host]
                if not others or any(other.exit_code is None for other in others):
                    continue
            host.exit_code = code if code >= 0 else 128 - code
            return

    async def _boot(self, host: _Host) -> int:
        began = monotonic()
        process = await asyncio.create_subprocess_exec(
            *self.plan.wrap, sys.executable, "-P", "-m", "keepstep", "train",
            "--base-dir", str(host.folder), "--address", "127.0.0.1",
            *(word for each in self.hosts for word in ("--etcd", f"{each.name}=127.0.0.1:{each.etcd_port}")),
            "--port-base", str(host.port_base), "--scratch-dir", str(host.folder / "scratch"),
            "--machine", f"{kernel.boot_id()}-{host.name}",
            "--policy", self.plan.policy, "--store", self.plan.store,
            *(word for override in self._overrides() for word in ("--set", override)),
            "--", self.plan.script, *self.plan.arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES_MAX, preexec_fn=partial(kernel.die_with_parent, os.getpid()),
            env={**read_environment(), "TRAINING_JOB_NAME": "local"},
        )  # fmt: skip
        host.process = process
        assert process.stdout is not None
        with (host.folder / "log.txt").open("ab") as log:
            while line := await process.stdout.readline():
                log.write(line)
                log.flush()
                if not self.plan.quiet:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
        code = await process.wait()
        host.wall_s = monotonic() - began
        return code

    def _overrides(self) -> list[str]:
        """What is set for each host; a preflight would hold this one machine against itself, unless it is asked for."""
        return ["telemetry.listen=127.0.0.1:0", "health.preflight=off", *self.plan.overrides]

    def _forward(self, number: int) -> None:
        """The run is interrupted: so is every host."""
        self._stopping = True
        for host in self.hosts:
            if host.process is not None and host.process.returncode is None:
                for pid in self._inits(host.process.pid):
                    kernel.kill(pid, number)

    def _inits(self, pid: int) -> list[int]:
        """The host's init as this process sees it: what was started, or the children of what wraps it."""
        if not self.plan.wrap:
            return [pid]
        return [child for child, process in kernel.processes().items() if process.parent == pid] or [pid]

    # --- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the journals: inflict the faults that are due, show progress."""
        waiting = list(self.plan.faults)
        shown_at = monotonic()
        while any(host.exit_code is None for host in self.hosts):
            await sleep(_TICK_S)
            for host in self.hosts:
                host.look()
            step = max(host.step for host in self.hosts)  # no rank is more than a step behind another
            for fault in list(waiting):
                if step >= fault.step and self._inflict(fault):
                    waiting.remove(fault)
            if monotonic() - shown_at >= _PROGRESS_S:
                shown_at = monotonic()
                self._show()

    def _inflict(self, fault: PlannedFault) -> bool:
        host = self.hosts[fault.rank]
        target: int | None = host.worker_pid
        if fault.kind == "kill-agent":
            target = host.agent_pid
        elif fault.kind == "kill-uploader":
            target = uploader_of(host.agent_pid)
        elif fault.kind == "kill-host":
            target = host.process.pid if host.process is not None else None
        if not target:
            return False
        self.inflicted.append((str(fault), unix_time()))
        if fault.kind == "kill-host":
            kill_family(target)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
        self._say(f"{fault}: SIGKILL to process {target}")
        return True

    def _show(self) -> None:
        newest = max(self.hosts, key=lambda host: host.generation)
        self._say(
            f"step {max(host.step for host in self.hosts)}, generation {newest.generation}, "
            f"restarts {newest.restarts}, committed step {newest.durable}"
        )

    def _say(self, text: str) -> None:
        print(f"keepstep local | {text}", flush=True)

    def _write_summary(self, codes: dict[str, int]) -> None:
        summary = summarize(self.plan.folder / "hosts", self.inflicted, codes)
        summary |= printed_values(self.hosts[0].folder / "log.txt")
        summary["goodput"] = read_goodput({host.name: (host.output, host.wall_s) for host in self.hosts})
        path = self.plan.folder / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        self._say(describe(summary))
        self._say(f"written to {path}")


def etcd_port(block: int) -> int:
    """The first of two ports for the etcd of the host that has this block; what a dead run left there is passed by.

    Raises:
        QuorumError: none are free.
    """
    for port in range(_ETCD_PORTS_FROM + 2 * block, _ETCD_PORTS_TO - 1, 2 * _PORT_BLOCKS):
        if is_free(port) and is_free(port + 1):
            return port
    raise QuorumError(f"all ports for etcd from {_ETCD_PORTS_FROM} to {_ETCD_PORTS_TO} are taken", "end what has them")


def is_free(port: int) -> bool:
    """Whether nobody listens on a local port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is closed and lingers is in nobody's way
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def describe(summary: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [
        f"done: {summary['steps']} steps, {summary['restarts']} restarts, {summary['lost_steps']} steps lost, "
        f"committed step {summary['durable_step']}"
    ]
    for recovery in summary["recoveries"]:
        phases = ", ".join(
            f"{name.replace('_', ' ')} {value:.3f} s" for name, value in recovery.items() if name != "total"
        )
        lines.append(f"recovered in {recovery['total']:.3f} s: {phases}")
    if summary["goodput"]["hosts"]:
        spent = ", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in summary["goodput"]["s"].items())
        lines.append(f"all hosts together: {spent}")
    if "final_accuracy" in summary:
        lines.append(f"final accuracy {summary['final_accuracy']:.4f}")
    return "\nkeepstep local | ".join(lines)


def _lock(path: Path) -> IO[bytes] | None:
    """The file, locked; None where another run has it, or another user."""
    try:
        file = path.open("a+b")
    except PermissionError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _note(lock: IO[bytes], text: bytes) -> None:
    lock.truncate(0)
    lock.write(text)
    lock.flush()


def _discard_data_of_the_killed() -> None:
    """Give back the memory that was taken by runs in any folder which were killed."""
    for path in _PORTS.glob("[0-9]*"):
        lock = _lock(path)
        if lock is None:
            continue
        with lock:
            lock.seek(0)
            scratch = lock.read()
            if scratch.startswith(b"/") and b"\0" not in scratch:
                discard_data_dir(Path(os.fsdecode(scratch)))
            _note(lock, b"")
