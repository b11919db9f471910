"""A host as the tests play it: a real init above an agent that is a few lines of Python, and what both leave behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
WAIT_S = 60.0
MARK = "KEEPSTEP_TEST_MARK"

_T = TypeVar("_T")

PRELUDE = """
import asyncio, ctypes, json, os, select, signal, socket, subprocess, sys, time
from pathlib import Path
from keepstep import init, kernel

here = Path(os.environ["HERE"])
state = json.loads(os.environ["KEEPSTEP_INIT_STATE"])
boot = state["boot"]

def note(name, value):
    (here / (name + ".new")).write_text(json.dumps(value))
    os.rename(here / (name + ".new"), here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def connect():
    return kernel.PacketLink(socket.socket(fileno=int(os.environ["KEEPSTEP_INIT_FD"])))

def hear(link):
    select.select([link.fd], [], [])
    return json.loads(link.receive()[0])

def start_worker(code="time.sleep(600)"):
    prelude = "import os, signal, time; from keepstep import kernel; kernel.die_with_parent(%d);" % os.getpid()
    return subprocess.Popen([sys.executable, "-c", prelude + code], start_new_session=True)

def start_orphan():
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.execvp("sleep", ["sleep", "600"])
        note("orphan", pid)
        os._exit(0)
    os.wait()

def end(how):
    if how < 0:
        os.kill(os.getpid(), -how)
    os._exit(how)
"""


def wait_until(look: Callable[[], _T], what: str) -> _T:
    """Return the first true answer of `look`; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not (answer := look()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(0.01)
    return answer


def state_of(pid: int) -> str:
    """The state letter of a process as /proc shows it; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


class Host:
    """One init process started by a test, and everything that descends from it, told by a mark in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, agent: str, *, unshare: tuple[str, ...] = (), restarts_max: int = 5) -> int:
        """Start init with an agent that runs PRELUDE and then `agent`; return init's pid as this test sees it."""
        script = self.folder / "agent.py"
        script.write_text(PRELUDE + textwrap.dedent(agent))
        main = (
            "import sys; from keepstep import init; sys.exit(init.main(sys.argv[2:], "
            "agent_command=[sys.executable, sys.argv[1]], restarts_max=" + str(restarts_max) + "))"
        )
        namespace = ["unshare", "--pid", "--fork", "--kill-child", *unshare] if unshare else []
        env = {**os.environ, "PYTHONPATH": str(RUNTIME), "HERE": str(self.folder), MARK: self.mark}
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*namespace, sys.executable, "-c", main, str(script)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if not unshare:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_until(lambda: children.read_text().split(), "init in its namespace")[0])

    def noted(self, name: str) -> str:
        path = self.folder / name
        wait_until(path.exists, f"{name}; so far:\n{self.output()}")
        return path.read_text()

    def exit_code(self) -> int:
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def left(self) -> list[int]:
        """Pids of all that was started here and still runs."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if needle in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return [pid for pid in found if is_alive(pid)]

    def clean_up(self) -> None:
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait(WAIT_S)


def can_unshare() -> bool:
    """Whether this machine lets the tests make a PID namespace."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--pid", "--fork", "--mount-proc", "true"]).returncode == 0
