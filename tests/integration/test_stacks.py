"""The stacks of processes that hang in every way, read from outside or written by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from keepstep.adapters import stacks
from keepstep_worker import wire as wires
from tests.support.fake_agent import FakeAgent, eventually

pytestmark = pytest.mark.integration
RUNTIME = str(Path(wires.__file__).parent.parent)

HANGING = """
import ctypes, re, sys, threading, time

def sleeps(): time.sleep(3600)
def spins(): re.match(r"(a+)+$", "a" * 100 + "b")
def sinks():
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.pause()

def loads():
    loading.set()
    threading.Event().wait()

loading = threading.Event()
threading.Thread(target=loads, daemon=True).start()
loading.wait()
print("ready", flush=True)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "hanging.py"
    path.write_text(HANGING)
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are to be killed, with all that they started."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def functions(threads: tuple[stacks.Thread, ...], main: bool) -> set[str]:
    return {frame.function for thread in threads if thread.is_main is main for frame in thread.frames}


@pytest.mark.parametrize(("how", "state"), [("sleeps", "S"), ("spins", "R"), ("sinks", "D"), ("stopped", "T")])
def test_a_process_is_looked_into_whatever_it_hangs_in(script, started, how, state):
    function = "sleeps" if how == "stopped" else how
    command = [sys.executable, str(script), function]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    threads = asyncio.run(read_until(lambda: stacks.python_stacks(process.pid), function))
    if how == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: stacks.look(process.pid).state == state)
        threads = asyncio.run(read_until(lambda: stacks.python_stacks(process.pid), function))
    eventually(lambda: stacks.look(process.pid).state == state)
    assert function in functions(threads, main=True)
    assert "loads" in functions(threads, main=False)
    assert f"{process.pid} {state} " in stacks.kernel_side(process.pid)


@pytest.mark.parametrize("how", ["sleeps", "spins"])
def test_a_worker_writes_its_stacks_when_it_is_asked(tmp_path, script, started, how):
    agent, file = FakeAgent(), tmp_path / "stacks"
    try:
        endpoint = agent.connect()
        more = {"PYTHONPATH": RUNTIME, "KEEPSTEP_STACKS_FILE": str(file)}
        process = subprocess.Popen(
            [sys.executable, "-m", "keepstep_worker", str(script), how],
            env=agent.environment(endpoint, **more),
            pass_fds=(agent.wire_fd, endpoint.fileno()),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(process)
        endpoint.close()
        agent.wait_for("hello")
        threads = asyncio.run(read_until(lambda: stacks.ask_for_stacks(process.pid, wires.STACKS_SIGNAL, file), how))
        assert "loads" in functions(threads, main=False)
    finally:
        agent.close()


async def read_until(
    read: Callable[[], Awaitable[tuple[stacks.Thread, ...]]], function: str
) -> tuple[stacks.Thread, ...]:
    """Read until the process has come to where it hangs: on its way it may not be to be read at all."""
    give_up = time.monotonic() + 60
    while True:
        try:
            threads = await read()
        except OSError:
            if time.monotonic() > give_up:
                raise
            continue
        if function in functions(threads, main=True):
            return threads
