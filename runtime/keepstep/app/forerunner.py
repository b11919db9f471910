"""The first worker's process, begun before its world is known: it starts while the agent loads the rest of itself.

It runs the worker's own command, up to where it has to know who it is (`keepstep_worker/forerunner.py`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.adapters.processes import Started, WorkerSpec, discard, is_dead, launch, standard_sinks
from keepstep.app.places import Places, find_interpreter, make_guest, whole_environment
from keepstep.core.job import JobSpec
from keepstep.core.launch import script_command, stands_by
from keepstep.core.launch.parameter_server import SERVED


@dataclass
class Forerunner:
    """A process that waits to be told which worker it is, and this end of its socket."""

    spec: WorkerSpec
    started: Started
    endpoint: socket.socket

    def can_be(self, worker: WorkerSpec) -> bool:
        """Whether it was started as this worker would be, and has not ended since."""
        return self.spec.argv == worker.argv and not is_dead(self.started.process.pid)

    def become(self, worker: WorkerSpec) -> None:
        """Tell it what this worker's environment has beside its own: whatever else is there by now is to stay."""
        more = {name: value for name, value in worker.env.items() if self.spec.env.get(name) != value}
        hand_over(self.endpoint, {"environment": more}, worker.pass_fds)

    def dismiss(self) -> None:
        """Hang up on it: it ends."""
        self.endpoint.close()
        discard(self.started.pumps)


def begin(job: JobSpec, environment: Mapping[str, str], places: Places) -> Forerunner | None:
    """Start the process, where this host alone is the world and so is sure to have a worker; None elsewhere.

    What can not be started here is none either: the worker's own start says why. Nor is an interpreter that is a
    script itself: nobody knows what that looks for in a worker's environment.

    Args:
        environment: the user's.
    """
    if len(job.hosts) > 1 or job.strategy in SERVED or not stands_by(job):
        return None
    if is_script(find_interpreter(job.python, places.code, environment.get("PATH"))):
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.suppress(OSError):
        own = {"KEEPSTEP_FORERUNNER_FD": str(theirs.fileno())}
        spec = WorkerSpec(
            worker_id="forerunner",
            argv=script_command(job),
            env=whole_environment(environment, make_guest(places.guest), own),
            prefix="",
            cwd=str(places.code),
            pass_fds=(theirs.fileno(),),
            held=True,
        )
        return Forerunner(spec, launch(spec, standard_sinks()), ours)
    ours.close()
    return None


def is_script(path: str | None) -> bool:
    """Whether a program is a text that names its interpreter."""
    try:
        with open(path or "", "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def hand_over(endpoint: socket.socket, told: dict[str, Any], fds: tuple[int, ...]) -> None:
    """Tell a process that waits which worker it is, and give it that one's descriptors."""
    with os.fdopen(os.memfd_create("keepstep-worker", os.MFD_CLOEXEC), "wb") as file:
        file.write(json.dumps(told).encode())
        file.flush()
        file.seek(0)
        rights = array.array("i", (*fds, file.fileno()))
        with contextlib.suppress(OSError):  # it has died: its exit is reported
            endpoint.sendmsg([b"{}"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
