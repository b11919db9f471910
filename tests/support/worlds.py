"""The workers' processes of a job, seen from outside: when each began and when it was gone, whatever the agents say."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Worker:
    """One worker's process.

    Attributes:
        started_at: unix seconds; it did not run before.
        gone_at: unix seconds; it did not run any more. None while it runs.
    """

    host: str
    pid: int
    generation: int
    rank: int
    started_at: float
    gone_at: float | None = None


class Worlds:
    """Keeps watch over the workers: `look` finds new ones, and whoever waits here learns of ends at once."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._poll = select.poll()
        self._watched: dict[int, Worker] = {}
        """By the descriptor that tells of the process's end."""

    def close(self) -> None:
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()

    def look(self, running: Mapping[str, Sequence[int]]) -> None:
        """Find workers among the processes of each host."""
        self.wait(0)
        known = {worker.pid for worker in self._watched.values()}
        for host, pids in running.items():
            for pid in pids:
                if pid not in known:
                    self._find(host, pid)

    def _find(self, host: str, pid: int) -> None:
        with contextlib.suppress(OSError):
            variables = environment_of(pid)
            if b"KEEPSTEP_GENERATION" not in variables or _parent_is_worker(pid):
                return
            fd = os.pidfd_open(pid)
            generation, rank = int(variables[b"KEEPSTEP_GENERATION"]), int(variables[b"KEEPSTEP_RANK"])
            self._watched[fd] = Worker(host, pid, generation, rank, started_at(pid))
            self.workers.append(self._watched[fd])
            self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Let time pass, and note what ends meanwhile."""
        until = time.monotonic() + seconds
        while True:
            for fd, _ in self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
                self._watched.pop(fd).gone_at = time.time()
                self._poll.unregister(fd)
                os.close(fd)
            if time.monotonic() >= until:
                return

    def of(self, generation: int, host: str | None = None) -> list[Worker]:
        return [w for w in self.workers if w.generation == generation and host in (None, w.host)]

    def overlaps(self) -> list[tuple[Worker, Worker]]:
        """Pairs of workers of two generations that ran at the same time: there must be none."""
        return [
            (older, newer)
            for older in self.workers
            for newer in self.workers
            if older.generation < newer.generation and (older.gone_at is None or older.gone_at > newer.started_at)
        ]


def environment_of(pid: int) -> dict[bytes, bytes]:
    """The environment that a process was started with.

    Raises:
        OSError: it is gone.
    """
    parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (part.partition(b"=") for part in parts)}


def started_at(pid: int) -> float:
    """Unix seconds at which a process was made, to the tick before.

    Raises:
        OSError: it is gone.
    """
    ticks = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS_PER_S


def _parent_is_worker(pid: int) -> bool:
    """Whether a worker has made this process: then it is no worker of its own."""
    parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return b"KEEPSTEP_GENERATION" in environment_of(parent)
