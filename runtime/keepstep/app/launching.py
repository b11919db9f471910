"""What a worker is started with: its command, its environment, the folder with the guest, the files it may leave
behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import keepstep
import keepstep_worker
from keepstep.adapters.processes import ProcessHost, WorkerProcess, WorkerSpec
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.standing_by import Standbys
from keepstep.core.actions import StartServer, StartStandby, StartWorker
from keepstep.core.values import frozen

FAILURE_BYTES_MAX = 1024
"""The platform shows no more of a failure file."""
TLS_FOLDER = "tls"


@frozen
class Places:
    """Folders of this host: scratch for what may be lost, output for what is kept with the job, code to run in."""

    scratch: Path
    output: Path
    code: Path
    failure_file: Path

    @property
    def tls(self) -> Path:
        """Where this host's certificate and key lie, if it has any."""
        return self.scratch.absolute() / TLS_FOLDER


class Launcher:
    """Starts this host's workers the way the contract wants them started."""

    def __init__(
        self,
        host: str,
        environment: Mapping[str, str],
        places: Places,
        *,
        link: WorkerLink,
        standbys: Standbys,
        log: Callable[[str], None],
    ) -> None:
        """Args: environment: the user's whole environment, to which each worker's own is added."""
        self._host, self._environment, self._code_dir = host, dict(environment), places.code
        self._failure_file, self._errors = places.failure_file, places.scratch / "errors"
        self._work = places.scratch.absolute() / "work"
        self.link, self.standbys, self.log = link, standbys, log
        self._errors.mkdir(parents=True, exist_ok=True)
        self._guest = make_guest(places.scratch / "guest")
        self._groups: dict[str, int] = {}

    def start(self, action: StartWorker, processes: ProcessHost) -> WorkerProcess:
        """Start a worker with a fresh wire, or have a standby become it.

        Raises:
            OSError: the command can not be started.
        """
        self.error_file(action.worker_id).unlink(missing_ok=True)
        self.stacks_file(action.worker_id).unlink(missing_ok=True)
        fds, wire_environment, handed_over = self.link.prepare(action.worker_id)
        files = {
            "KEEPSTEP_FAILURE_FILE": str(self.error_file(action.worker_id)),
            "KEEPSTEP_STACKS_FILE": str(self.stacks_file(action.worker_id)),
        }
        spec = WorkerSpec(
            worker_id=action.worker_id,
            argv=action.command,
            env=self._whole(dict(action.environment) | wire_environment | files),
            prefix=f"[{self._host} rank {action.rank}] ",
            cwd=str(self._code_dir),
            pass_fds=fds,
        )
        try:
            process = self.standbys.take(action.standby, spec, processes) or processes.start(spec)
        finally:
            handed_over()
        self._groups[action.worker_id] = process.pgid
        return process

    def start_server(self, action: StartServer, processes: ProcessHost) -> WorkerProcess:
        """Start a process that reports no steps and holds no snapshots.

        Raises:
            OSError: the command can not be started.
        """
        file = self.error_file(action.server_id)
        file.unlink(missing_ok=True)
        given = {"KEEPSTEP_FAILURE_FILE": str(file), "KEEPSTEP_WORK_DIR": str(self._work)}
        spec = WorkerSpec(
            worker_id=action.server_id,
            argv=action.command,
            env=self._whole(dict(action.environment) | given),
            prefix=f"[{self._host} {action.title}] ",
            cwd=str(self._code_dir),
        )
        process = processes.start(spec)
        self._groups[action.server_id] = process.pgid
        return process

    def start_standby(self, action: StartStandby, processes: ProcessHost) -> None:
        """Start a process that waits to become a worker."""
        spec = WorkerSpec("", (), env=self._whole({}), prefix="", cwd=str(self._code_dir))
        self.standbys.start(action, spec, processes)

    def _whole(self, more: Mapping[str, str]) -> dict[str, str]:
        """A worker's whole environment."""
        environment = self._environment | dict(more) | {"KEEPSTEP_PARENT_PID": str(os.getpid())}
        searched = filter(None, (str(self._guest), environment.get("PYTHONPATH")))
        environment["PYTHONPATH"] = os.pathsep.join(searched)
        environment.setdefault("PYTHONUNBUFFERED", "1")
        return environment

    def forget(self, worker_id: str) -> int:
        """The process group of a worker that is gone; 0 where it was never started."""
        return self._groups.pop(worker_id, 0)

    def error_file(self, worker_id: str) -> Path:
        """Where a worker writes its first error."""
        return self._errors / f"{worker_id}.json"

    def stacks_file(self, worker_id: str) -> Path:
        """Where a worker writes its stacks when it is asked to."""
        return self._errors / f"{worker_id}.stacks"

    def write_failure(self, text: str) -> None:
        """Write the failure file; what matters first, since the platform shows 1,024 bytes."""
        try:
            write_failure(self._failure_file, text)
        except OSError as error:
            self.log(f"{self._failure_file} can not be written: {error}")


def write_failure(path: Path, text: str) -> None:
    """Write a failure file, cut to what the platform shows.

    Raises:
        OSError: it can not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.encode()[:FAILURE_BYTES_MAX].decode(errors="ignore"), encoding="utf-8")


def make_guest(folder: Path) -> Path:
    """A folder that holds `keepstep_worker` and nothing else, so that the agent's packages never meet the user's."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "keepstep_worker"
    source = Path(keepstep_worker.__file__).parent
    if not link.is_symlink() or link.resolve() != source:
        link.unlink(missing_ok=True)
        link.symlink_to(source, target_is_directory=True)
    return folder


def forget_own_source(environment: dict[str, str]) -> None:
    """Take the agent's own source tree, where it runs from one, out of what the user's Python searches."""
    own = str(Path(keepstep.__file__).parents[1])
    parts = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.abspath(p) != own]
    if parts:
        environment["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        environment.pop("PYTHONPATH", None)
