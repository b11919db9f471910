"""How a worker's process comes into being: what it is started with, and where what it prints goes."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from typing import Protocol

from keepstep.adapters.processes.output import LineSink, OutputPump
from keepstep.core.values import frozen


@frozen
class WorkerSpec:
    """One process to start.

    Attributes:
        worker_id: the name it is reported under.
        argv: the command; the first word is searched for on PATH of `env`.
        env: its whole environment.
        prefix: what each line of its output begins with, as `[algo-1 rank 0] `.
        cwd: its working directory; None for this process's own.
        pass_fds: descriptors it inherits under their numbers.
        oom_score_adj: added to this process's own: the kernel is to kill it first when memory runs out (up to 1000).
        held: pass its output on only once it was given another name (`ProcessHost.rename`, `adopt`), or has failed.
    """

    worker_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    prefix: str
    cwd: str | None = None
    pass_fds: tuple[int, ...] = ()
    oom_score_adj: int = 300
    held: bool = False


Pumps = tuple[OutputPump, OutputPump]


class Child(Protocol):
    """A child of this process."""

    @property
    def pid(self) -> int:
        """Its number, which stays its own until its end was waited for."""

    def wait(self) -> int:
        """Wait for its end, and return its exit code, less than 0 for a signal."""


@frozen
class Orphan:
    """A child that this process was given when the one between them had ended."""

    pid: int

    def wait(self) -> int:
        """Wait for its end, and return its exit code, less than 0 for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@frozen
class Started:
    """A process that nobody watches yet, and its standard output and error."""

    process: Child
    pumps: Pumps
    held: bool


def launch(spec: WorkerSpec, sinks: tuple[LineSink, LineSink]) -> Started:
    """Start a process in a session of its own; it is for a `ProcessHost` to adopt.

    Raises:
        OSError: the command can not be started.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a worker dies with the thread that starts it: only the main thread may")
    prefix = spec.prefix.encode()
    pumps = (OutputPump(prefix, sinks[0], spec.held), OutputPump(prefix, sinks[1], spec.held))
    try:
        process = subprocess.Popen(
            spec.argv,
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=pumps[0].write_fd,
            stderr=pumps[1].write_fd,
            pass_fds=spec.pass_fds,
            start_new_session=True,
        )
    except OSError:
        if spec.held:
            discard(pumps)
        raise
    finally:
        for pump in pumps:  # where the start failed, this ends the pumps too
            os.close(pump.write_fd)
    return Started(process, pumps, spec.held)


def discard(pumps: Pumps) -> None:
    """A held process is gone, or is of no use: nobody wants to know what it wrote."""
    for pump in pumps:
        pump.discard()


def copied(pumps: Pumps) -> Pumps:
    """Make the pipes of a copy of a held process; the caller closes their `write_fd` once the copy has them."""
    return pumps[0].copy(), pumps[1].copy()


def is_child(pid: int) -> bool:
    """Whether this process is told of another one's end."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def is_dead(pid: int) -> bool:
    """Whether a child has died; it stays a zombie."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
