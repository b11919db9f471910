"""The workers' processes of a job, seen from outside: when each began and when it was gone, whatever the agents say."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.004


@dataclass
class Worker:
    """One worker's process.

    Attributes:
        started_at: unix seconds; it did not run before. It began within a tick of the kernel's clock from then.
        alive_at: unix seconds; it was seen to run then.
        gone_at: unix seconds; it did not run any more, and had ended some time before. None while it runs.
    """

    host: str
    pid: int
    generation: int
    rank: int
    started_at: float
    alive_at: float = 0.0
    gone_at: float | None = None


class Worlds:
    """Keeps watch over the workers: `look` finds new ones, and a thread sees all the time which of them run."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._ends = select.epoll()
        self._lock = threading.Lock()
        self._watched: dict[int, Worker] = {}
        """By the descriptor that tells of the process's end."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="worlds")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        self._ends.close()

    def look(self, running: Mapping[str, Sequence[int]]) -> None:
        """Find workers among the processes of each host."""
        with self._lock:
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
            worker = Worker(host, pid, generation, rank, started_at(pid))
            with self._lock:
                self._watched[fd] = worker
                self.workers.append(worker)
                self._ends.register(fd, select.EPOLLIN)

    def _observe(self) -> None:
        while not self._closed.is_set():
            before = time.time()
            ended = {fd for fd, _ in self._ends.poll(_LOOK_S)}
            with self._lock:
                for fd in ended:
                    self._watched.pop(fd).gone_at = time.time()
                    self._ends.unregister(fd)
                    os.close(fd)
                for worker in self._watched.values():
                    worker.alive_at = before

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._closed.wait(seconds)

    def of(self, generation: int, host: str | None = None) -> list[Worker]:
        return [w for w in self.workers if w.generation == generation and host in (None, w.host)]

    def overlaps(self) -> list[tuple[Worker, Worker]]:
        """Pairs of workers of two generations of which the older one was seen to run once the newer one ran.

        There must be none. When exactly a process ended is nowhere to be read; that it still runs can be seen.
        """
        return [
            (older, newer)
            for older in self.workers
            for newer in self.workers
            if older.generation < newer.generation and older.alive_at > newer.started_at + 1 / _TICKS_PER_S
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
