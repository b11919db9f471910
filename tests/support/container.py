"""One host's container as the platform makes it, in a folder: a real `keepstep train`, and all that it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from keepstep.adapters.journal import read_lines
from keepstep.kernel import is_alive

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
MARK = "KEEPSTEP_TEST_MARK"
DEADLINE_S = 60.0
"""No run comes near it unless something hangs, on a busy machine neither."""

_POLL_S = 0.02
_SETTINGS = (f"launch.python={sys.executable}", "telemetry.listen=127.0.0.1:0")
_T = TypeVar("_T")

LOOP = """
from pathlib import Path
from keepstep_worker.session import Session
from keepstep_worker.slab import Tensor, fill
import sys, time

here = Path(__file__).parents[1]
session, done = Session.current(), 0
blob = bytes(int((here / "blob").read_text())) if (here / "blob").exists() else b""
view = session.restored()
if view is not None:
    done = int.from_bytes(view.raw("replicated/step"), "little")
    session.restoration_done(done)
session.set_provider(
    lambda: [
        Tensor("replicated/step", "I64", (), lambda target: fill(target, done.to_bytes(8, "little"))),
        Tensor("replicated/blob", "U8", (len(blob),), lambda target: fill(target, blob)),
    ]
)
session.join("loop")
step = done
while not (here / "enough").exists():
    step += 1
    session.enter_step(step)
    time.sleep(0.002)
    PLAN
    done = step
    session.complete_step(step)
session.finish()
"""
"""A custom loop without TensorFlow: trains until a file says that it is enough."""


class Container:
    """A base directory to spoil, and one run of `keepstep train` on it.

    Attributes:
        base: what /opt/ml is in a container.
        options: of `keepstep train`, beside the base directory; the last one wins.
        environment: added to this process's own.
        small_disks: folders that get a file system of their own of a megabyte, seen by this run alone.
        full_disks: the same, without a free byte.
        powerless: whether files that nobody may read or write are so for root, too.
        kept: closed at the end of the test.
    """

    def __init__(self, folder: Path) -> None:
        self.base = folder / "ml"
        self.options: list[str] = []
        self.environment: dict[str, str] = {}
        self.small_disks: list[Path] = []
        self.full_disks: list[Path] = []
        self.powerless = False
        self.kept = contextlib.ExitStack()
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever the test came to."""
        if self._process is not None:
            for pid in (self._process.pid, *self.left()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(DEADLINE_S)
        self.kept.close()

    def fill(self) -> None:
        """Put in what the platform would: nothing is wrong with it."""
        self.write("input/config/resourceconfig.json", resources())
        self.write("input/config/hyperparameters.json", json.dumps({"sagemaker_program": "train.py"}))
        self.write("input/config/inputdataconfig.json", "{}")
        self.write("code/train.py", "print('the script ran')\n")

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file below the base directory, and return its path."""
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def folder(self, name: str) -> Path:
        """Make a folder below the base directory, and return its path."""
        (self.base / name).mkdir(parents=True)
        return self.base / name

    # --- the run -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        settings = [word for setting in _SETTINGS for word in ("--set", setting)]
        places = ["--base-dir", str(self.base), "--scratch-dir", str(self._folder / "scratch")]
        command = [sys.executable, "-P", "-m", "keepstep", "train", *places, "--address", "127.0.0.1", *settings]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPSTEP_", "SM_"))}
        environment |= {"PYTHONPATH": str(RUNTIME), MARK: self._mark, **self.environment}
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*self._wrap(), *command, *self.options],
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the outermost process, as the platform does."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill_worker(self) -> None:
        """SIGKILL to the worker that was started last."""
        events = [event for event in self.events() if event["kind"] == "worker_started"]
        os.kill(events[-1]["pid"], signal.SIGKILL)

    def wait(self, within_s: float = DEADLINE_S) -> int:
        """The exit code; that nothing is left is asserted."""
        assert self._process is not None
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.output()}") from None
        assert self.left() == [], self.output()
        return code

    def run(self) -> int:
        """Start, and wait for the end."""
        self.start()
        return self.wait()

    def wait_for(self, look: Callable[[], _T | None], what: str) -> _T:
        """Wait until `look` gives something; fails where the run ends before, or nothing comes."""
        assert self._process is not None
        give_up = time.monotonic() + DEADLINE_S
        while True:
            ended = self._process.poll() is not None
            found = look()
            if found:
                return found
            assert not ended, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < give_up, f"no {what}:\n{self.output()}"
            time.sleep(_POLL_S)

    def _wrap(self) -> list[str]:
        """The command that the run is given to: a namespace with the small disks, or less power."""
        if self.powerless and os.geteuid() == 0:
            return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"]
        if not self.small_disks and not self.full_disks:
            return []
        small, full = ([shlex.quote(str(folder)) for folder in each] for each in (self.small_disks, self.full_disks))
        commands = [f"mount -t tmpfs -o size=1m keepstep-test {folder}" for folder in (*small, *full)]
        commands += [f"! head -c 1048577 /dev/zero >{folder}/ballast 2>&1" for folder in full]
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        return ["unshare", *user, "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]

    # --- what it says and leaves -------------------------------------------------------------------------------------

    def output(self) -> str:
        path = self._folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self) -> list[str]:
        """Its output, line by line."""
        return self.output().splitlines()

    def failure(self) -> str | None:
        """The failure file's text; None where there is none. That the platform shows all of it is asserted."""
        path = self.base / "output" / "failure"
        if not path.exists():
            return None
        content = path.read_bytes()
        assert 0 < len(content) <= 1024
        return content.decode()

    def reasons(self) -> list[str]:
        """The reasons of all decisions so far."""
        found = []
        for path in self.base.glob("output/data/keepstep/*/journal.jsonl"):
            for _, line in read_lines(path):
                found += [reason for reason, _ in line.get("notes", ())]
        return found

    def events(self) -> list[dict[str, Any]]:
        """What this host's agents have heard so far."""
        found = []
        for path in self.base.glob("output/data/keepstep/*/journal.jsonl"):
            for _, line in read_lines(path):
                found += [line["event"]] if "event" in line else []
        return found

    def metric(self, name: str) -> float | None:
        """What /metrics shows now; None where it shows nothing of the name."""
        port = re.search(r"metrics on port (\d+)", self.output())
        if port is None:
            return None
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return None if found is None else float(found[1])

    def left(self) -> list[int]:
        """Pids of all that this run has started, directly or not, and that still runs."""
        needle = f"{MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if needle in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return [pid for pid in found if is_alive(pid)]


def resources(**changes: Any) -> str:
    """A resourceconfig.json of one host."""
    return json.dumps({"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo", **changes})
