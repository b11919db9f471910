"""The first error of a worker that has ended: what it wrote down, or what a library printed before it ended it.

Libraries in native code raise nothing: they print a line and abort. Who reads that line knows whether it was the GPU,
the network or somebody else's death.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from keepstep.adapters.processes import ExitStatus
from keepstep.core.events import FirstError
from keepstep.core.values import evolve

_MESSAGE_MAX, _TRACEBACK_MAX, _LINES_MAX, _LINE_MAX = 2000, 4000, 3, 1000

_LIBRARIES = (
    ("NCCL", r"NCCL WARN (?P<text>.+)"),
    ("CUDA", r"(?:^|[\s:])[EF](?:\d{4})? [^\]]*\] (?P<text>.*\bCUDA_ERROR_(?!NO_DEVICE)\w+.*)"),
    ("XLA", r"(?:^|[\s:])F(?:\d{4})? [^\]]*xla[^\]]*\.cc:\d+\] (?P<text>.+)"),
    ("TensorFlow", r"(?:^|[\s:])F(?:\d{4})? [^\]]*\.(?:cc|h):\d+\] (?P<text>.+)"),
    ("C++", r"terminate called after throwing an instance of (?P<text>.+)"),
    ("C++", r"^\s*(?P<text>what\(\):.+)"),
    ("glibc", r"(?P<text>(?:free|malloc|realloc|munmap_chunk)\(\): .+|double free or corruption.*)"),
    ("glibc", r"(?P<text>\*\*\* .+ \*\*\*: terminated)"),
)
"""Who says it, and what. Source: absl's and glog's lines of severity E and F, NCCL_DEBUG=WARN, libstdc++, glibc.

Patterns are compiled once they are wanted: seldom, and not at a start.
"""
_FOLLOWS = (
    r"connection (?:reset|refused|closed)|socket closed|remote (?:process|peer|error)|coordination ?service|heartbeat"
    r"|unhealthy|preempted"
)
"""What they say of somebody else's death; of exceptions the worker tells itself (`keepstep_worker.firsterror`)."""
_ADDRESS = r"0x[0-9a-f]+"
_ITS_OWN = frozenset({
    signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP,
})  # fmt: skip
"""Signals that a process gets by what it does itself: what it printed last may be why."""


def first_error(path: Path, status: ExitStatus, at: float) -> FirstError | None:
    """What is known of why a worker has ended; None where it has said nothing.

    Args:
        path: what it wrote itself, if it came to that.
        status: how it ended, and the last that it printed.
        at: when its end was noticed, unix seconds.
    """
    written = _read(path)
    if written is not None and written.error_type:
        return written
    said = _said(status.last_words) if _ended_itself(status) else None
    if said is None:
        return written
    library, text, follows = said
    error = FirstError(library, text, at, 0, follows)
    return error if written is None else evolve(error, rank=written.rank, at=written.at)


def _read(path: Path) -> FirstError | None:
    """None where nothing was written that can be read."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        error = FirstError(
            str(raw["type"]), str(raw["message"])[:_MESSAGE_MAX], float(raw["time_unix"]), int(raw["step"]),
            bool(raw["victim"]),
        )  # fmt: skip
        return evolve(error, rank=int(raw["rank"]), traceback=str(raw["traceback"])[-_TRACEBACK_MAX:])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ended_itself(status: ExitStatus) -> bool:
    """A shell, or mpirun, tells of its child's signal by its exit code."""
    return (status.signal or (status.exit_code or 0) - 128) in _ITS_OWN


def _said(words: str) -> tuple[str, str, bool] | None:
    """The library that said why it ended the process, its last words, and whether these are of another one's death.

    The same each time that the same happens.
    """
    found: dict[str, str] = {}
    for line in words.splitlines():
        for library, pattern in _LIBRARIES:
            match = re.search(pattern, line[:_LINE_MAX])
            if match is not None:
                found[re.sub(_ADDRESS, "0x", match["text"].strip())] = library
                break
    if not found:
        return None
    lines = list(found)[-_LINES_MAX:]
    # a GPU that fails is no victim, whatever follows from it
    follows = "CUDA" not in found.values() and any(re.search(_FOLLOWS, line, re.IGNORECASE) for line in lines)
    return found[lines[0]], "; ".join(lines)[:_MESSAGE_MAX], follows
