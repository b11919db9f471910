"""Answers the agent's question whether this step's gradients are ready, while the training itself waits for others.

A thread of its own waits for it, and does nothing until it is asked. What it says is no sign of life: heartbeats come
from the steps alone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable

from keepstep_worker import probe
from keepstep_worker.channel import Channel, ChannelClosed
from keepstep_worker.wire import ANSWER_BYTES_MAX, INQUIRIES


def offer(channel: Channel, start_ns: Callable[[], int]) -> None:
    """Have the agent able to ask from now on; nothing more happens where it is already.

    Args:
        channel: the line to the agent.
        start_ns: when the step that is being executed was begun, monotonic nanoseconds; 0 before the first.
    """
    if channel.has_inquiries:
        return
    channel.has_inquiries = True
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
            try:
                ready = probe.is_ready(start_ns()) if start_ns() else None
            except Exception:  # whatever TensorFlow has against it: then it is not known
                ready = None
            line.send(json.dumps({"to": int(question), "ready": ready}).encode())
