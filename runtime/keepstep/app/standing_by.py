"""Standbys of this host: what they import, how they come into being, and how one of them becomes a worker.

The first one is started and makes its imports. Once it has, it stays behind as the fork server
(`keepstep_worker/forkserver.py`), and the standbys are copies of it, until a script turns out to import something else,
or otherwise. While a copy is not there, the fork server stands in for it: it can become the worker itself.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keepstep import kernel
from keepstep.adapters.memory import available_bytes
from keepstep.adapters.processes import (
    Orphan,
    ProcessHost,
    Pumps,
    Started,
    WorkerProcess,
    WorkerSpec,
    copied,
    discard,
    is_child,
)
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
    """A process that waits, this end of its socket, how it was started, and what it is to import from where."""

    process: WorkerProcess
    endpoint: socket.socket
    spec: WorkerSpec
    files: Mapping[str, str]

    @property
    def is_dismissed(self) -> bool:
        """Whether it was hung up on: it is about to end."""
        return self.endpoint.fileno() < 0


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
        self._fork_server: _Standby | None = None
        self._copying: dict[socket.socket, Pumps] = {}
        self._learnt = _Learnt()
        self._became: tuple[str, str, socket.socket] | None = None

    def learn(self, worker_id: str, message: Mapping[str, Any]) -> None:
        """A worker says what it imports, or that what its standby has imported does not suit its script."""
        if message.get("kind") == "unfit":
            self._learnt = _Learnt()
            self._dismiss_fork_server()
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
        files, standby_id = dict(self._learnt.files), action.standby_id
        spec = replace(
            worker,
            worker_id=standby_id,
            argv=(*action.command, *files),
            env=self._learnt.applied_to(worker.env),
            prefix=f"[{self._host} standby] ",
            oom_score_adj=_OOM_SCORE_ADJ,
            held=True,
        )
        server = self._fork_server
        if server is not None and (server.spec.argv, server.spec.env) == (spec.argv, spec.env):
            self._copy(standby_id, server, processes)
            return
        self._dismiss_fork_server()
        self._start_afresh(spec, files, processes)

    def _start_afresh(self, spec: WorkerSpec, files: Mapping[str, str], processes: ProcessHost) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        env = {**spec.env, "KEEPSTEP_STANDBY_FD": str(theirs.fileno())}
        with theirs:
            try:
                process = processes.start(replace(spec, env=env, pass_fds=(theirs.fileno(),)))
            except OSError as error:
                ours.close()
                self._post(StandbyGone(spec.worker_id, str(error), _AGAIN_S))
                return
        self._started.add(spec.worker_id)
        self._waiting[spec.worker_id] = _Standby(process, ours, spec, files)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive, spec.worker_id, processes)

    def take(self, standby_id: str, worker: WorkerSpec, processes: ProcessHost) -> WorkerProcess | None:
        """Have a standby become this worker, at once or as soon as it has its imports; without one, the forerunner.

        None where neither is there.
        """
        standby = self._forget(standby_id)
        if standby is None or standby.is_dismissed:
            return self._take_forerunner(worker, processes)
        if standby is self._fork_server:
            self._fork_server = None
        name = standby.process.worker_id
        process = processes.rename(name, worker)
        if process is None:
            standby.endpoint.close()
            return None
        self._started.discard(name)
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
        if self._fork_server is not None and self._fork_server.process.worker_id == worker_id:
            self._dismiss_fork_server()
        for standby_id, standby in list(self._waiting.items()):
            if standby.process.worker_id == worker_id:
                self._forget(standby_id)
                standby.endpoint.close()
                self._post(StandbyGone(standby_id, detail))
        return True

    def close(self) -> None:
        """Hang up on all of them: they end."""
        self._let_go()
        self._dismiss_fork_server()
        for ours, pumps in self._copying.items():
            asyncio.get_running_loop().remove_reader(ours.fileno())
            ours.close()
            discard(pumps)
        if self._copying:
            self._copying.clear()
            kernel.become_subreaper(becomes=False)
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
        if standby is not None and not standby.is_dismissed:
            asyncio.get_running_loop().remove_reader(standby.endpoint.fileno())
        return standby

    def _receive(self, standby_id: str, processes: ProcessHost) -> None:
        """A process says that it has its imports behind it."""
        standby = self._waiting[standby_id]
        ready = _received(standby.endpoint)
        if ready is None:  # its exit is reported elsewhere
            return
        if ready.get("files") != standby.files:
            self._forget(standby_id)
            standby.endpoint.close()
            self._post(StandbyGone(standby_id, "what it imports lies elsewhere than what the script imports"))
        elif ready.get("can_fork"):
            self._fork_server = standby
            self._copy(standby_id, standby, processes)
        else:
            self._post(StandbyReady(standby_id))

    # --- copies ------------------------------------------------------------------------------------------------------

    def _copy(self, standby_id: str, server: _Standby, processes: ProcessHost) -> None:
        """Have the fork server make a standby; until that is there, it is one itself."""
        self._waiting[standby_id] = server
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        pumps = copied(server.process.pumps)
        kernel.become_subreaper()  # the copy's parent ends, and this process is to be the next
        self._copying[ours] = pumps
        with theirs, contextlib.suppress(OSError):  # it has died: nobody will be at the other end
            rights = array.array("i", (theirs.fileno(), *(pump.write_fd for pump in pumps)))
            server.endpoint.sendmsg([b'{"kind": "fork"}'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        for pump in pumps:
            os.close(pump.write_fd)
        made = partial(self._copied, standby_id, server, ours, processes)
        asyncio.get_running_loop().add_reader(ours.fileno(), made)

    def _copied(self, standby_id: str, server: _Standby, ours: socket.socket, processes: ProcessHost) -> None:
        """A copy says that it is there, or can not come any more."""
        ready = _received(ours)
        pumps = self._copying.pop(ours)
        kernel.become_subreaper(becomes=bool(self._copying))
        is_wanted = self._waiting.get(standby_id) is server
        if ready is None or not is_child(pid := int(ready["pid"])):
            discard(pumps)
            ours.close()
            if is_wanted and not server.is_dismissed:
                self._fork_server = None
                self._post(StandbyReady(standby_id))
            return
        spec = replace(server.spec, worker_id=f"{standby_id}.copy")
        copy = replace(server, process=processes.adopt(spec, Started(Orphan(pid), pumps, held=True)), endpoint=ours)
        self._started.add(spec.worker_id)
        if is_wanted:
            self._waiting[standby_id] = copy
            self._post(StandbyReady(standby_id))
        else:
            ours.close()

    def _dismiss_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.endpoint.close()
            self._fork_server = None


def _received(endpoint: socket.socket) -> dict[str, Any] | None:
    """What a process says, which says no more; None where it has hung up."""
    asyncio.get_running_loop().remove_reader(endpoint.fileno())
    with contextlib.suppress(OSError):
        packet = endpoint.recv(_MESSAGE_BYTES_MAX)
        if packet:
            message: dict[str, Any] = json.loads(packet)
            return message
    return None
