"""Answers what the agent asks while the script is busy: are this step's gradients ready, and what are all threads in?

A thread of its own waits for it, and does nothing until it is asked. What it says is no sign of life: heartbeats come
from the steps alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import socket
import threading
from collections.abc import Callable
from typing import IO

from keepstep_worker import probe
from keepstep_worker.channel import Channel, ChannelClosed
from keepstep_worker.wire import ANSWER_BYTES_MAX, INQUIRIES, STACKS, STACKS_SIGNAL

_stacks: IO[str] | None = None


def write_stacks_to(path: str) -> None:
    """Have the stacks of all threads be written to a file on demand; set before the agent is told hello.

    The thread that answers holds the interpreter for that, so that no other one's calls change under its eyes. Where
    something does not give it the interpreter, faulthandler answers a signal. It may be reading calls that change, and
    this process die of it: one of Python 3.11 that starts threads lives through a few.
    """
    global _stacks
    with contextlib.suppress(OSError):
        _stacks = open(path, "w")  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, file=_stacks, all_threads=True)


def offer(channel: Channel, start_ns: Callable[[], int]) -> None:
    """Have the agent able to ask from now on.

    Args:
        channel: the line to the agent.
        start_ns: when the step that is being executed was begun, monotonic nanoseconds; 0 before the first.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # no descriptor is left: the script's training is worth more
        return
    threading.Thread(target=_answer, args=(ours, start_ns), name="keepstep inquiries", daemon=True).start()
    with theirs, contextlib.suppress(ChannelClosed):  # the end of this process is near
        channel.send({"kind": INQUIRIES}, fds=[theirs.fileno()])


def _answer(line: socket.socket, start_ns: Callable[[], int]) -> None:
    with line, contextlib.suppress(OSError):
        while question := line.recv(ANSWER_BYTES_MAX):
            number, _, what = question.decode().partition(" ")
            said = _write_stacks() if what == STACKS else _is_ready(start_ns())
            line.send(json.dumps({"to": int(number), "said": said}).encode())


def _is_ready(start_ns: int) -> bool | None:
    try:
        return probe.is_ready(start_ns) if start_ns else None
    except Exception:  # whatever TensorFlow has against it: then it is not known
        return None


def _write_stacks() -> bool | None:
    """Return None where there is no file to write them to: a signal would not help."""
    if _stacks is None:
        return None
    try:
        faulthandler.dump_traceback(_stacks, all_threads=True)
    except (OSError, ValueError):  # the script has closed it
        return None
    return True
