"""Whole jobs on this machine: `keepstep local` with real agents, etcd and TensorFlow, watched through its journals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keepstep.app.replay import journals_under
from keepstep.kernel import is_alive

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "e2e" / "jobs"
PYTHON = os.environ.get("KEEPSTEP_TF_PYTHON", str(ROOT / ".venv-tf" / "bin" / "python"))
MARK = "KEEPSTEP_TEST_MARK"
DEADLINE_S = 200.0
"""No run of the tests comes near it unless it hangs, on a busy machine neither."""

ACCOUNT_S = 0.1
"""How far the buckets of a host's account may be from its wall time."""

_POLL_S = 0.02
_T = TypeVar("_T")


@dataclass
class LocalRun:
    """One `keepstep local` of a script in tests/e2e/jobs: its options, and its process once started.

    Attributes:
        folder: everything of this run; the script's results lie in `folder/results`.
        script: file name in tests/e2e/jobs.
        arguments: of the script, beside --out.
        options: of `keepstep local`, beside --hosts, --python and --out.
        libraries: folders that the script's Python searches.
        deadline_s: no run comes near it unless it hangs.
    """

    folder: Path
    script: str
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()
    hosts: int = 2
    libraries: Sequence[Path] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None
    deadline_s: float = DEADLINE_S

    def __enter__(self) -> LocalRun:
        """Start it."""
        results = self.folder / "results"
        results.mkdir(parents=True)
        paths = [str(ROOT / "runtime"), *map(str, self.libraries), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "2", MARK: self.mark}
        environment.pop("TF_CONFIG", None)
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "keepstep", "local", "--quiet"),
                    *("--hosts", str(self.hosts), "--python", PYTHON, "--out", str(self.folder), *self.options),
                    *(str(JOBS / self.script), "--out", str(results), *self.arguments),
                ],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever the test came to."""
        assert self.process is not None
        for pid in (self.process.pid, *self.left()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    # --- while it runs -----------------------------------------------------------------------------------------------

    def wait_for(self, look: Callable[[], _T | None], what: str) -> _T:
        """Wait until `look` gives something; fails where the run ends before or nothing comes."""
        assert self.process is not None
        give_up = time.monotonic() + self.deadline_s
        while True:
            ended = self.process.poll() is not None
            found = look()
            if found:
                return found
            assert not ended, f"the run ended before {what}:\n{self.told()}"
            assert time.monotonic() < give_up, f"no {what}:\n{self.told()}"
            time.sleep(_POLL_S)

    def terminate(self) -> None:
        """SIGTERM to all hosts; `keepstep local` hands it to each."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the end of the run; returns its exit code."""
        assert self.process is not None
        try:
            code = self.process.wait(self.deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end:\n{self.told()}") from None
        for host, account in self.accounts().items():
            lived_s = account["ended_at"] - account["born_at"]
            assert abs(account["this_attempt_s"] - lived_s) <= ACCOUNT_S, f"{host}, {lived_s:.3f} s: {account}"
        return code

    # --- what it has left --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [f"algo-{number}" for number in range(1, self.hosts + 1)]

    def journals(self, host: str) -> list[Path]:
        """This host's journals, the oldest first."""
        folder = self.folder / "hosts" / host / "output" / "data" / "keepstep" / host
        return journals_under(folder)

    def turns(self, host: str) -> list[dict[str, Any]]:
        """The turns of this host's agents, in order; a line that is being written is left out."""
        found = []
        for path in self.journals(host):
            for line in path.read_text(errors="replace").splitlines(keepends=True):
                if line.endswith("\n") and line.startswith('{"n":') and '"event":' in line:
                    found.append(json.loads(line))
        return found

    def events(self, kind: str, host: str | None = None) -> list[dict[str, Any]]:
        """The events of one kind, of one host or of all."""
        hosts = self.names if host is None else [host]
        return [turn["event"] for name in hosts for turn in self.turns(name) if turn["event"]["kind"] == kind]

    def reasons(self, host: str | None = None) -> list[str]:
        """The reasons that were given, of one host or of all."""
        hosts = self.names if host is None else [host]
        return [reason for name in hosts for turn in self.turns(name) for reason, _ in turn["notes"]]

    def notes(self, host: str) -> list[tuple[str, str]]:
        """The reasons that this host gave, and what each was about."""
        return [(reason, detail) for turn in self.turns(host) for reason, detail in turn["notes"]]

    def completed(self) -> int:
        """The newest step that any host has reported."""
        return max((event["completed"] for event in self.events("steps_sampled")), default=0)

    def log(self, host: str) -> str:
        path = self.folder / "hosts" / host / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def told(self) -> str:
        """The ends of what the run and its hosts have printed."""
        logs = [(self.folder / "output").read_text(errors="replace"), *map(self.log, self.names)]
        return "\n----\n".join(text[-4000:] for text in logs)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def accounts(self) -> dict[str, dict[str, Any]]:
        """Where each host's time went, of those whose agent came to its end."""
        found = {}
        for host in self.names:
            path = self.folder / "hosts" / host / "output" / "data" / "keepstep" / host / "goodput.json"
            if path.exists():
                found[host] = json.loads(path.read_text())
        return found

    def results(self) -> dict[str, dict[str, bytes]]:
        """What each rank has written at the end: every array with its type and shape, byte for byte."""
        found = {}
        for path in sorted((self.folder / "results").glob("*.npz")):
            with zipfile.ZipFile(path) as file:
                found[path.name] = {name: file.read(name) for name in file.namelist()}
        return found

    def left(self) -> list[int]:
        """Pids of all that this run has started, directly or not, and that still runs."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if needle in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return [pid for pid in found if is_alive(pid)]


def differences(found: dict[str, dict[str, bytes]], wanted: dict[str, dict[str, bytes]]) -> list[str]:
    """The names of the arrays that are not equal, bit for bit."""
    names: Iterable[tuple[str, str]] = {
        (rank, name) for results in (found, wanted) for rank in results for name in results[rank]
    }
    return sorted(
        f"{rank}:{name}" for rank, name in names if found.get(rank, {}).get(name) != wanted.get(rank, {}).get(name)
    )
