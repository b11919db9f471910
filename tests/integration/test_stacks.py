"""The stacks of processes that hang in every way, read from outside or written by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from keepstep.adapters import stacks
from keepstep_worker import wire as wires
from tests.integration.test_profiling import Host, played
from tests.support.fake_agent import eventually

pytestmark = pytest.mark.integration
ANSWER_S = 5.0
"""A worker that does not answer for so long, here, is one whose interpreter is held."""
TIMES = 200
"""So often one that works is asked: of a signal it would have died by then."""

HANGING = """
import ctypes, re, sys, threading, time

def sleeps(): time.sleep(3600)
def works():
    while True:
        thread = threading.Thread(target=str)
        thread.start()
        thread.join()
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


@pytest.mark.parametrize(("how", "answers"), [("sleeps", True), ("works", True), ("spins", False)])
def test_a_worker_writes_its_stacks_when_it_is_asked_and_by_a_signal_where_it_can_not(tmp_path, script, how, answers):
    file, heard = tmp_path / "stacks", []

    async def play(host: Host) -> None:
        async def has_written() -> bool | None:
            heard.append(await host.link.has_written_stacks(host.link.first_rank, ANSWER_S))
            return heard[-1]

        command = [sys.executable, "-m", "keepstep_worker", str(script), how]
        await host.start(command, KEEPSTEP_STACKS_FILE=str(file))
        assert host.process is not None
        async with asyncio.timeout(60):
            while not host.link.progress().pid:
                await asyncio.to_thread(os.sched_yield)
        pid = host.process.pid
        read = partial(stacks.ask_for_stacks, pid, wires.STACKS_SIGNAL, file, has_written)
        threads = await read_until(read, how)
        assert "loads" in functions(threads, main=False)
        for _ in range(TIMES if answers else 0):
            assert await host.link.has_written_stacks(host.link.first_rank, 60)
        assert host.process.poll() is None

    played(tmp_path, play)
    assert heard[-1] is answers


async def read_until(
    read: Callable[[], Awaitable[tuple[stacks.Thread, ...]]], function: str
) -> tuple[stacks.Thread, ...]:
    """Read until the process has come to where it hangs: on its way it may not be to be read at all."""
    give_up = time.monotonic() + 60
    while True:
        try:
            threads = await read()
        except OSError:
            await asyncio.to_thread(os.sched_yield)  # have others of this loop get on
            if time.monotonic() > give_up:
                raise
            continue
        if function in functions(threads, main=True):
            return threads
