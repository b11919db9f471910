"""Whole jobs of several hosts, each with a network of its own: a real `keepstep train` in every namespace.

One directory is the store of all. A host that was switched off comes back with the same name and an empty disk; what
its former life has left on the old one is still read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keepstep.adapters.etcd_member import MemberSpec, find_etcd, plan_member
from tests.support.namespaces import Network
from tests.support.worlds import Worlds, environment_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
"""No run comes near it unless something hangs, on a busy machine neither."""

_ETCD = "etcd-1"
_POLL_S = 0.05
_T = TypeVar("_T")


@dataclass(frozen=True)
class Turn:
    """One line of a journal: which life of which host wrote it, when it decided, on what, and why."""

    host: str
    life: int
    now: float
    event: Mapping[str, Any]
    reasons: tuple[str, ...]
    actions: tuple[str, ...]

    @property
    def kind(self) -> str:
        return str(self.event["kind"])

    @property
    def record(self) -> Mapping[str, Any]:
        """The record that was seen or put; empty for another event."""
        found: Mapping[str, Any] = self.event.get("record", {}) if self.kind in ("record_seen", "record_put") else {}
        return found


@dataclass
class Life:
    """One incarnation of a host: its disk, its processes, and what was read of its journals so far."""

    host: str
    number: int
    folder: Path
    process: subprocess.Popen[bytes]
    was_killed: bool = False
    turns: list[Turn] = field(default_factory=list)
    _read: dict[tuple[int, bytes], int] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        """What /opt/ml is on a real one."""
        return self.folder / "ml"

    def look(self) -> None:
        """Take in what its journals say by now; a new agent begins a new file and gives the old one another name."""
        found = (self.base / "output" / "data" / "keepstep" / self.host).glob("journal.jsonl*")
        for path in sorted(found, key=lambda path: -int(path.suffix[1:]) if path.suffix[1:].isdigit() else 0):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                which = os.fstat(file.fileno()).st_ino, file.readline()  # another file may have got the same number
                file.seek(self._read.get(which, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[which] = self._read.get(which, 0) + len(line)
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "event" in line:
            reasons = tuple(reason for reason, _ in line["notes"])
            *others, last = line["event"].get("changes", [line["event"]])  # told together: the turn came after the last
            self.turns += [Turn(self.host, self.number, line["now"], event, (), ()) for event in others]
            self.turns.append(Turn(self.host, self.number, line["now"], last, reasons, tuple(line["actions"])))

    def log(self) -> str:
        path = self.folder / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def etcd_log(self) -> str:
        path = self.folder / "scratch" / "etcd.log"
        return path.read_text(errors="replace") if path.exists() else ""


class ManyHosts:
    """A job on hosts of their own: start them, do harm to them and to what joins them, read what came of it.

    Attributes:
        network: what joins them; faults of the network are its methods.
        script, arguments: what each host trains.
        options: of `keepstep train`, beside the folders and the store.
        environment: added to this process's own.
        lives: every incarnation of every host, in the order of their starts.
        may_end: hosts that need not be there until the end.
        worlds: the workers' processes, as seen from outside.
    """

    def __init__(
        self,
        folder: Path,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        hosts: int = 3,
        python: str = sys.executable,
        settings: Sequence[str] = (),
        etcd_elsewhere: bool = False,
    ) -> None:
        self.folder = folder
        self.network = Network(hosts, *([_ETCD] if etcd_elsewhere else []))
        self.names = self.network.names[:hosts]
        self.script, self.arguments = script, list(arguments)
        # Of which world a worker is, is seen by what it was started with, and a standby was started with nothing.
        words = [f"launch.python={python}", "launch.strategy=multi_worker", "launch.standby=0", *settings]
        self.options = [word for setting in words for word in ("--set", setting)]
        self.environment: dict[str, str] = {}
        self.lives: list[Life] = []
        self.may_end: set[str] = set()
        self.worlds = Worlds()
        self.job = f"job-{uuid.uuid4().hex[:8]}"
        self._etcd: subprocess.Popen[bytes] | None = None

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def __enter__(self) -> ManyHosts:
        """Switch all of them on."""
        self.store.mkdir(parents=True)
        self.network.__enter__()
        try:
            if _ETCD in self.network.names:
                self._start_etcd()
            for host in self.names:
                self.boot(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever the test came to."""
        self.network.__exit__()
        self.worlds.look(self._running())
        if self._etcd is not None:
            self._etcd.wait(DEADLINE_S)
        for life in self.lives:
            life.process.wait(DEADLINE_S)
        self.worlds.close()

    def _start_etcd(self) -> None:
        """An etcd that is there already, on a machine that nothing happens to."""
        url = f"http://{self.network.address(_ETCD)}"
        spec = MemberSpec(
            _ETCD, self.network.address(_ETCD), 2379, 2380, self.folder / "etcd", self.folder / "etcd.log", self.job
        )
        command = plan_member(find_etcd(), spec)
        with command.log_path.open("wb") as log:
            words = self.network.command(_ETCD, list(command.argv))
            self._etcd = subprocess.Popen(words, env={**os.environ, **command.env}, stdout=log, stderr=log)
        self.options += ["--set", f"coordination.endpoints=[{url}:2379]", "--set", "coordination.tls=off"]

    # --- hosts -------------------------------------------------------------------------------------------------------

    def boot(self, host: str) -> None:
        """Start a host's container: an empty disk, with what the platform puts there."""
        number = 1 + sum(1 for life in self.lives if life.host == host)
        folder = self.folder / "hosts" / host / str(number)
        config = folder / "ml" / "input" / "config"
        config.mkdir(parents=True)
        resources = {"current_host": host, "hosts": self.names, "network_interface_name": "eth0"}
        for name, content in (("resourceconfig", resources), ("hyperparameters", {}), ("inputdataconfig", {})):
            (config / f"{name}.json").write_text(json.dumps(content))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPSTEP_", "SM_"))}
        environment |= {"PYTHONPATH": str(ROOT / "runtime"), "TRAINING_JOB_NAME": self.job, **self.environment}
        command = [
            *(sys.executable, "-P", "-m", "keepstep", "train", "--base-dir", str(folder / "ml")),
            *("--scratch-dir", str(folder / "scratch"), "--store", str(self.store), *self.options),
            *("--", str(self.script), *self.arguments),
        ]
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                self.network.command(host, command),
                env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.lives.append(Life(host, number, folder, process))

    def kill_host(self, host: str) -> None:
        """Switch a machine off: the others hear no word of it, and its memory is lost."""
        life = self.life(host)
        life.was_killed = True
        self.network.remove(host)
        life.process.wait(DEADLINE_S)
        self.look()

    def restart_host(self, host: str) -> None:
        """The same name and address again, and nothing else of what was there."""
        assert host not in self._running(), f"{host} was not switched off"
        self.network.add(host)
        self.boot(host)

    def life(self, host: str) -> Life:
        """The newest incarnation of a host."""
        return [life for life in self.lives if life.host == host][-1]

    def _running(self) -> dict[str, list[int]]:
        """The pids on each host that has any."""
        found = {host: self.network.pids(host) for host in self.names}
        return {host: pids for host, pids in found.items() if pids}

    # --- processes ---------------------------------------------------------------------------------------------------

    def agent(self, host: str) -> int | None:
        """The pid of a host's agent; None while it has none."""
        return self._found(host, b"/keepstep/app/agent.py\0")

    def uploader(self, host: str) -> int | None:
        return self._found(host, b"keepstep.app.uploader\0")

    def etcd(self, host: str) -> int | None:
        """The pid of a host's etcd member."""
        return self._found(host, b"--initial-cluster-token=")

    def worker(self, host: str) -> int | None:
        """The pid of a host's worker."""
        for worker in self.worlds.workers:
            if worker.host == host and worker.gone_at is None:
                return worker.pid
        return None

    def _found(self, host: str, needle: bytes) -> int | None:
        for pid in self.network.pids(host):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if needle in command and b"KEEPSTEP_GENERATION" not in environment_of(pid):
                    return pid
        return None

    def kill(self, pid: int | None) -> None:
        """SIGKILL one process."""
        assert pid is not None, f"no such process:\n{self.told()}"
        os.kill(pid, signal.SIGKILL)

    def freeze(self, pid: int | None) -> int:
        """SIGSTOP a process; returns its pid, for `thaw`."""
        assert pid is not None, f"no such process:\n{self.told()}"
        os.kill(pid, signal.SIGSTOP)
        return pid

    def thaw(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    # --- what happens ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what can be seen now."""
        self.worlds.look(self._running())
        for life in self.lives:
            life.look()

    def wait_for(self, look: Callable[[], _T | None], what: str) -> _T:
        """Wait until `look` gives something; fails where nothing comes, or a host ends that is not one of `may_end`."""
        give_up = time.monotonic() + DEADLINE_S
        while True:
            ended = [host for host in self.names if host not in self.may_end and self._has_ended(host)]
            self.look()
            found = look()
            if found:
                return found
            assert not ended, f"{ended} ended before {what}:\n{self.told()}"
            assert time.monotonic() < give_up, f"no {what}:\n{self.told()}"
            self.worlds.wait(_POLL_S)

    def _has_ended(self, host: str) -> bool:
        life = self.life(host)
        return not life.was_killed and life.process.poll() is not None

    def wait(self, *hosts: str) -> dict[str, int]:
        """Wait until these hosts have ended, or all that were not switched off; the exit code of each."""
        wanted = [self.life(host) for host in hosts or self.names if hosts or not self.life(host).was_killed]
        self.may_end.update(self.names)
        self.wait_for(lambda: all(life.process.poll() is not None for life in wanted), "end")
        self.look()
        return {life.host: life.process.returncode for life in wanted}

    # --- what is known -----------------------------------------------------------------------------------------------

    def turns(self, host: str | None = None) -> list[Turn]:
        """The turns of one host, or of all, by time."""
        found = [turn for life in self.lives if host in (None, life.host) for turn in life.turns]
        return sorted(found, key=lambda turn: turn.now)

    def events(self, kind: str, host: str | None = None) -> list[Turn]:
        return [turn for turn in self.turns(host) if turn.kind == kind]

    def reasons(self, host: str | None = None) -> list[str]:
        return [reason for turn in self.turns(host) for reason in turn.reasons]

    def records(self, kind: str, host: str | None = None) -> list[Turn]:
        """The turns in which a record of this kind was seen or put."""
        return [turn for turn in self.turns(host) if turn.record.get("kind") == kind]

    def generations(self, phase: str = "ready") -> list[Mapping[str, Any]]:
        """The first record of each generation in this phase, in the order of their numbers."""
        first: dict[int, Mapping[str, Any]] = {}
        for turn in self.records("generation"):
            if turn.record["phase"] == phase:
                first.setdefault(turn.record["number"], turn.record)
        return [first[number] for number in sorted(first)]

    def world(self, generation: int) -> list[str]:
        """The hosts of a generation that was ready, in rank order."""
        found = [record for record in self.generations() if record["number"] == generation]
        return [host for record in found for host, *_ in record["members"]]

    def generation(self) -> int:
        """The newest generation that was ready; 0 before the first."""
        return max((record["number"] for record in self.generations()), default=0)

    def leader(self) -> str | None:
        """Who led last."""
        found = self.records("leader")
        return str(found[-1].record["host"]) if found else None

    def etcd_hosts(self) -> list[str]:
        """Who keeps etcd, by the newest record of it that is not of a change under way."""
        found = [turn.record for turn in self.records("etcd") if not turn.record["joining"]]
        return list(found[-1]["hosts"]) if found else []

    def completed(self, host: str | None = None) -> int:
        """The newest step that was reported."""
        return max((turn.event["completed"] for turn in self.events("steps_sampled", host)), default=0)

    def committed(self) -> list[Turn]:
        """The commits, by time."""
        return self.events("checkpoint_committed")

    def durable(self) -> int:
        """The newest step that was committed."""
        return max((turn.event["step"] for turn in self.committed()), default=0)

    def head(self) -> dict[str, Any]:
        """HEAD in the store, as it is now; what the script may have written itself has another one."""
        found = list(self.store.glob("*/HEAD.json"))
        assert len(found) == 1, found
        value: dict[str, Any] = json.loads(found[0].read_text())
        return value

    def log(self, host: str) -> str:
        """What a host has printed, in all its lives."""
        return "".join(life.log() for life in self.lives if life.host == host)

    def failure(self, host: str) -> str | None:
        """The failure file of a host's newest life; None where there is none."""
        path = self.life(host).base / "output" / "failure"
        return path.read_text() if path.exists() else None

    def told(self) -> str:
        """The ends of what the hosts have printed, and of what their etcd has."""
        lives = [(f"{life.host}, life {life.number}", life) for life in self.lives]
        etcd = [f"---- etcd of {name}\n{life.etcd_log()[-2000:]}" for name, life in lives if life.etcd_log()]
        return "\n".join([*(f"---- {name}\n{life.log()[-4000:]}" for name, life in lives), *etcd])


@contextlib.contextmanager
def frozen(run: ManyHosts, pid: int | None) -> Iterator[int]:
    """A process that does nothing meanwhile."""
    stopped = run.freeze(pid)
    try:
        yield stopped
    finally:
        with contextlib.suppress(ProcessLookupError):
            run.thaw(stopped)
