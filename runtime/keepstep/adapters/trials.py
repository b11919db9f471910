"""How fast one stream to another host is, each way, and what its clock says: asked over a connection that is there.

A trial is one line of JSON, {version, trial: give | take | clock, size}, on the connections of `peers`. `give`: the
answer, {ok}, has `size` bytes behind it. `take`: the bytes follow the request, and the answer follows them. `clock`:
the answer has the other's unix time. Sizes grow until one takes long enough, so a slow line has little to carry.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.adapters.clock import monotonic, unix_time
from keepstep.core.values import frozen

VERSION = 1
SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 16 << 20)
"""Bytes of each stream in turn: 37 MiB in all, each way."""
SIZE_BYTES_MAX = max(SIZES)
WAY_S = 2.0
"""How long all of one way may take."""
_ENOUGH_S = 0.4
"""No further size is tried after so long: a moment in which the machine was busy must not be all that was seen."""
_PIECE_BYTES = 1 << 19
_LINE_BYTES_MAX = 512
_CLOCKS = 3


@frozen
class Trial:
    """Bytes a second to the other host and from it, and by how many seconds its clock is ahead of this one's."""

    sent: float
    received: float
    ahead_s: float


@dataclass
class _Moved:
    """How much has gone over a line."""

    size_bytes: int = 0


def answer_trial(line: socket.socket, asked: Mapping[str, Any]) -> bool:
    """Do what one request asks for; False where it is no trial that this version knows.

    Raises:
        OSError: the connection breaks.
    """
    size = asked.get("size", 0)
    if type(size) is not int or not 0 <= size <= SIZE_BYTES_MAX:
        return False
    match asked.get("trial"):
        case "clock":
            _say(line, {"ok": True, "unix": unix_time()})
        case "give":
            _say(line, {"ok": True})
            _send(line, size, _Moved())
        case "take":
            _receive(line, size, _Moved())
            _say(line, {"ok": True})
        case _:
            return False
    return True


def try_line(connect: Callable[[], socket.socket], deadline: float) -> Trial:
    """Measure a line by all three kinds of trial.

    A way that takes longer than WAY_S has the rate that it had by then; its connection is of no use any more.

    Args:
        connect: to a host that answers trials.
        deadline: second of CLOCK_MONOTONIC by which it must be over.

    Raises:
        OSError: the connection breaks, or nothing comes at all.
        ValueError: the other side answers nonsense.
    """
    with connect() as line:
        ahead_s = _compare_clocks(line, deadline)
        sent = _measure(line, "take", deadline)
    with connect() as line:
        return Trial(sent, _measure(line, "give", deadline), ahead_s)


def _compare_clocks(line: socket.socket, deadline: float) -> float:
    """By how much the other's clock is ahead, as the quickest of some questions tells."""
    found = []
    for _ in range(_CLOCKS):
        before, began = unix_time(), monotonic()
        _request(line, {"trial": "clock"}, deadline)
        answer = _hear_ok(line, deadline)
        took_s = monotonic() - began
        found.append((took_s, float(answer["unix"]) - before - took_s / 2))
    return min(found)[1]


def _measure(line: socket.socket, trial: str, deadline: float) -> float:
    """Bytes a second one way, at the best."""
    since, best = monotonic(), 0.0
    until = min(deadline, since + WAY_S)
    for size in SIZES:
        began, moved = monotonic(), _Moved()
        try:
            _request(line, {"trial": trial, "size": size}, until)
            if trial == "take":
                _send(line, size, moved, until)
            _hear_ok(line, until)
            if trial == "give":
                _receive(line, size, moved, until)
        except TimeoutError:
            if not moved.size_bytes:
                raise
            return max(best, moved.size_bytes / (monotonic() - began))
        now = monotonic()
        best = max(best, size / (now - began))
        if now - since > _ENOUGH_S:
            break
    return best


def _request(line: socket.socket, question: Mapping[str, object], deadline: float) -> None:
    _wait(line, deadline)
    _say(line, {"version": VERSION, **question})


def _hear_ok(line: socket.socket, deadline: float) -> dict[str, Any]:
    answer = _hear(line, deadline)
    if answer.get("ok") is not True:
        raise ValueError(f"it answers {str(answer)[:80]}")
    return answer


def _say(line: socket.socket, message: Mapping[str, object]) -> None:
    line.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def _hear(line: socket.socket, deadline: float) -> dict[str, Any]:
    taken = bytearray()
    while not taken.endswith(b"\n"):
        _wait(line, deadline)
        got = line.recv(1)
        if not got:
            raise ConnectionError("it hung up")
        if len(taken) >= _LINE_BYTES_MAX:
            raise ValueError("no line of JSON")
        taken += got
    message = json.loads(taken)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _send(line: socket.socket, size: int, moved: _Moved, deadline: float | None = None) -> None:
    piece = memoryview(bytes(min(_PIECE_BYTES, size)))
    while moved.size_bytes < size:
        _wait(line, deadline)
        moved.size_bytes += line.send(piece[: size - moved.size_bytes])


def _receive(line: socket.socket, size: int, moved: _Moved, deadline: float | None = None) -> None:
    buffer = memoryview(bytearray(min(_PIECE_BYTES, size)))
    while moved.size_bytes < size:
        _wait(line, deadline)
        got = line.recv_into(buffer[: size - moved.size_bytes])
        if not got:
            raise ConnectionError("it broke off")
        moved.size_bytes += got


def _wait(line: socket.socket, deadline: float | None) -> None:
    """Let the line wait for no longer than until then; None: as long as it may anyway."""
    if deadline is None:
        return
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("it is too slow")
    line.settimeout(left)
