"""Standbys of this host: what they import, and how one of them becomes a worker."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep import kernel
from keepstep.adapters.memory import available_bytes
from keepstep.adapters.processes import ProcessHost, WorkerProcess, WorkerSpec
from keepstep.app.forerunner import Forerunner, hand_over
from keepstep.core.actions import StartStandby
from keepstep.core.events import Event, StandbyGone, StandbyReady, WorkerImported

MEMORY_BYTES_MIN = 1 << 30
"""What must be free before a standby is started: about twice what TensorFlow takes once it is imported."""
_AGAIN_S = 60.0
_MESSAGE_BYTES_MAX = 65_536
_OOM_SCORE_ADJ = 1000
"""A standby is what a host can do without first."""


@dataclass
class _Standby:
    """One that waits: its process, this end of its socket, and what it is to import from where."""

    process: WorkerProcess
    endpoint: socket.socket
    files: Mapping[str, str]


@dataclass
class _Learnt:
    """Of the newest worker that was started afresh: what it imported, from where, and what it had set by then."""

    files: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str | None] = field(default_factory=dict)

    def applied_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """An environment as it was when the first of the modules was imported."""
        whole = {**environment, **self.changes}
        return {name: value for name, value in whole.items() if value is not None}


class Standbys:
    """The processes that wait, by id, and what workers have taught."""

    def __init__(self, host: str, post: Callable[[Event], None], forerunner: Forerunner | None) -> None:
        self._host, self._post, self._forerunner = host, post, forerunner
        self._started: set[str] = set()
        self._waiting: dict[str, _Standby] = {}
        self._learnt = _Learnt()
        self._became: tuple[str, str, socket.socket] | None = None

    def learn(self, worker_id: str, message: Mapping[str, Any]) -> None:
        """A worker says what it imports, or that what its standby has imported does not suit its script."""
        if message.get("kind") == "unfit":
            self._learnt = _Learnt()
            names = ", ".join(map(str, message.get("variables", ())))
            if self._became is not None and self._became[0] == worker_id:
                self._post(StandbyGone(self._became[1], f"the script sets {names} otherwise"))
            return
        module, changes = str(message.get("module")), message.get("changes")
        if isinstance(changes, dict):
            if not self._learnt.files:
                self._learnt.changes = changes
            self._learnt.files[module] = str(message.get("file"))
            self._post(WorkerImported(worker_id, module))

    def start(self, action: StartStandby, worker: WorkerSpec, processes: ProcessHost) -> None:
        """Start one, if there is memory for it.

        Args:
            worker: a worker's folder and environment.
        """
        if available_bytes() < MEMORY_BYTES_MIN:
            self._post(StandbyGone(action.standby_id, "too little memory is free", _AGAIN_S))
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        files, standby_id = dict(self._learnt.files), action.standby_id
        spec = replace(
            worker,
            worker_id=standby_id,
            argv=(*action.command, *files),
            env=self._learnt.applied_to(worker.env) | {"KEEPSTEP_STANDBY_FD": str(theirs.fileno())},
            prefix=f"[{self._host} standby] ",
            pass_fds=(theirs.fileno(),),
            oom_score_adj=_OOM_SCORE_ADJ,
            held=True,
        )
        with theirs:
            try:
                process = processes.start(spec)
            except OSError as error:
                ours.close()
                self._post(StandbyGone(standby_id, str(error), _AGAIN_S))
                return
        self._started.add(standby_id)
        self._waiting[standby_id] = _Standby(process, ours, files)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive, standby_id)

    def take(self, standby_id: str, worker: WorkerSpec, processes: ProcessHost) -> WorkerProcess | None:
        """Have a standby become this worker, at once or as soon as it has its imports; without one, the forerunner.

        None where neither is there.
        """
        standby = self._forget(standby_id)
        if standby is None:
            return self._take_forerunner(worker, processes)
        process = processes.rename(standby_id, worker)
        if process is None:
            standby.endpoint.close()
            return None
        self._started.discard(standby_id)
        self._let_go()
        # closed too early, it would take back what was sent
        self._became = worker.worker_id, standby_id, standby.endpoint
        kernel.wake(process.pid)
        told = {"command": worker.argv, "environment": dict(worker.env)}
        hand_over(standby.endpoint, told, worker.pass_fds)
        return process

    def _take_forerunner(self, worker: WorkerSpec, processes: ProcessHost) -> WorkerProcess | None:
        forerunner, self._forerunner = self._forerunner, None
        if forerunner is None:
            return None
        if not forerunner.can_be(worker):
            forerunner.dismiss()
            return None
        self._let_go()
        self._became = worker.worker_id, "", forerunner.endpoint
        process = processes.adopt(worker, forerunner.started)
        forerunner.become(worker)
        return process

    def exited(self, worker_id: str, detail: str) -> bool:
        """Take note of a process's end; False where it was no standby."""
        if worker_id not in self._started:
            return False
        self._started.discard(worker_id)
        standby = self._forget(worker_id)
        if standby is not None:
            standby.endpoint.close()
            self._post(StandbyGone(worker_id, detail))
        return True

    def close(self) -> None:
        """Hang up on all of them: they end."""
        self._let_go()
        if self._forerunner is not None:
            self._forerunner.dismiss()
            self._forerunner = None
        for standby_id in list(self._waiting):
            standby = self._forget(standby_id)
            if standby is not None:
                standby.endpoint.close()

    def _let_go(self) -> None:
        if self._became is not None:
            self._became[2].close()
            self._became = None

    def _forget(self, standby_id: str) -> _Standby | None:
        standby = self._waiting.pop(standby_id, None)
        if standby is not None:
            asyncio.get_running_loop().remove_reader(standby.endpoint.fileno())
        return standby

    def _receive(self, standby_id: str) -> None:
        standby = self._waiting[standby_id]
        try:
            packet = standby.endpoint.recv(_MESSAGE_BYTES_MAX)
        except OSError:
            packet = b""
        asyncio.get_running_loop().remove_reader(standby.endpoint.fileno())
        if not packet:  # its exit is reported elsewhere
            return
        if json.loads(packet).get("files") == standby.files:
            self._post(StandbyReady(standby_id))
            return
        self._forget(standby_id)
        standby.endpoint.close()
        self._post(StandbyGone(standby_id, "what it imports lies elsewhere than what the script imports"))
