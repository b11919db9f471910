"""What a worker is started with: its command, its environment, the files it may leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep.adapters.processes import ProcessHost, WorkerProcess, WorkerSpec
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.places import Places, make_guest, whole_environment, write_failure
from keepstep.app.standing_by import Standbys
from keepstep.core.actions import StartServer, StartStandby, StartWorker


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
        self._guest = make_guest(places.guest)
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
        return whole_environment(self._environment, self._guest, more)

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
