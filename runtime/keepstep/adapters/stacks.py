"""What a process is doing, seen from outside: its state, and the stacks of its threads.

py-spy reads another process's memory without its help, and so sees one that is stopped or hangs in the kernel as well.
Where the container does not allow that, the process is asked to write its Python stacks itself: over its line or,
where something holds its interpreter, by a signal to faulthandler. One that is stopped does neither.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from keepstep.adapters.clock import sleep
from keepstep.core.values import frozen

_SPY_S, _ANSWER_S = 10.0, 2.0
_SAMPLES_PER_S = 50
_TICKS = os.sysconf("SC_CLK_TCK")
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@frozen
class Frame:
    """One call: where it is in, as the interpreter names it."""

    file: str
    line: int
    function: str


@frozen
class Thread:
    """One thread with its Python calls, the innermost first."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]


@frozen
class Look:
    """A process seen once: its state as proc(5) has it ("" where it is gone), its processor time in seconds."""

    state: str = ""
    cpu_s: float = 0.0


def look(pid: int) -> Look:
    """State and processor time of a process. Source: proc(5), /proc/pid/stat."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Look(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS)
    except (OSError, IndexError, ValueError):
        return Look()


async def python_stacks(pid: int) -> tuple[Thread, ...]:
    """The Python stacks of a process, read by py-spy without stopping it.

    Raises:
        OSError: they can not be read, for the reason given.
    """
    text = await _spy(("dump", "--json", "--nonblocking", "--pid", str(pid)), _SPY_S)
    return parse_spy(text)


async def native_stacks(pid: int, limit_s: float) -> str:
    """Native and Python stacks as text; the process is stopped while they are read, for no longer than this.

    Raises:
        OSError: they can not be had, for the reason given.
    """
    return await _spy(("dump", "--native", "--pid", str(pid)), limit_s)


async def record(pid: int, seconds: float, file: Path) -> None:
    """Sample the Python stacks of all threads of a process for so long, those that wait included, into a new file.

    It is one for https://www.speedscope.app; the process is not stopped for it.

    Raises:
        OSError: it can not be done, for the reason given.
    """
    how = ("--format", "speedscope", "--rate", str(_SAMPLES_PER_S), "--threads", "--idle", "--nonblocking")
    duration = str(max(1, round(seconds)))
    options = ("--duration", duration, *how, "--output", str(file), "--pid", str(pid))
    await _spy(("record", *options), seconds + _SPY_S)


async def ask_for_stacks(
    pid: int, signal: int, file: Path, has_written: Callable[[], Awaitable[bool | None]]
) -> tuple[Thread, ...]:
    """Have a process write its own stacks to `file`, which it has open.

    Args:
        pid: the process.
        signal: has faulthandler write them whatever holds the interpreter. One whose calls go on meanwhile may die of
            it (python/cpython#116008), so it is for the process that has not done so when it was asked.
        file: where they are written.
        has_written: asks it, and says whether it has written them; None where it can not, or can not be asked.

    Raises:
        OSError: it does not answer.
    """
    begun = file.stat().st_size
    written = await has_written()
    if written is None:
        raise OSError(f"process {pid} can not write them, or can not be asked to")
    if not written:
        os.kill(pid, signal)
        await _grown(file, begun, f"no stacks from process {pid} within {_ANSWER_S:.0f} s")
    return parse_faulthandler(file.read_bytes()[begun:].decode(errors="replace"))


async def _grown(file: Path, begun: int, wrong: str) -> None:
    size = begun
    for _ in range(int(_ANSWER_S / 0.1)):
        await sleep(0.1)
        last, size = size, file.stat().st_size
        if begun < last == size:  # it writes all of it within one call
            return
    raise TimeoutError(wrong)


def parse_spy(text: str) -> tuple[Thread, ...]:
    """Threads of `py-spy dump --json`.

    Raises:
        OSError: it is not what py-spy writes.
    """
    try:
        return tuple(
            Thread(
                str(thread["thread_name"] or thread["os_thread_id"]),
                thread["thread_name"] == "MainThread",
                tuple(Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in thread["frames"]),
            )
            for thread in json.loads(text)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"py-spy's answer can not be read: {error!r}") from error


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """Threads of what faulthandler writes; the main one comes last, where the signal is not handled in another."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _THREAD.match(line), _FRAME.match(line)
        if head is not None:
            threads.append((head[2], []))
        elif frame is not None and threads:
            threads[-1][1].append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    last = len(threads) - 1
    return tuple(Thread(name, at == last, tuple(frames)) for at, (name, frames) in enumerate(threads))


def show(threads: Sequence[Thread]) -> str:
    """Stacks as text, as a traceback has them but the innermost call first."""
    lines = []
    for thread in threads:
        lines.append(f"thread {thread.name}{' (main)' if thread.is_main else ''}")
        lines += [f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames]
    return "\n".join(lines)


def kernel_side(pid: int) -> str:
    """Each thread's name, state, and what it waits for in the kernel, as far as it may be read."""
    lines = []
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    except OSError:
        return ""
    for task in tasks:
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            channel = (task / "wchan").read_text()
        except OSError:
            continue
        lines.append(f"{task.name} {rest.split()[0]} {name} {channel}")
    return "\n".join(lines)


async def _spy(arguments: Sequence[str], timeout_s: float) -> str:
    beside = Path(sys.executable).parent / "py-spy"
    command = str(beside) if beside.exists() else shutil.which("py-spy")
    if command is None:
        raise OSError("py-spy is not installed")
    process = await asyncio.create_subprocess_exec(
        command, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            out, wrong = await process.communicate()
    except TimeoutError:
        raise TimeoutError(f"py-spy took longer than {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(wrong.decode(errors="replace").strip() or f"py-spy ended with {process.returncode}")
    return out.decode(errors="replace")
