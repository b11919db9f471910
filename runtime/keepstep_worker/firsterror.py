"""The first error: what went wrong in this worker, written to a file before the process dies.

A worker that dies because a peer died is a victim, and its error is no root cause. TensorFlow tells the two apart by
type and text; that is decided here by name, without importing TensorFlow.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from typing import Any

_MESSAGE_CHARACTERS_MAX = 2000
_TRACEBACK_CHARACTERS_MAX = 8000
_CAUSES_MAX = 8

_ERROR_PACKAGES = frozenset({"tensorflow", "horovod"})
_ALWAYS_VICTIMS = frozenset({"UnavailableError", "HorovodInternalError"})
_SOMETIMES_VICTIMS = frozenset({
    "AbortedError", "CancelledError", "InternalError", "DeadlineExceededError", "FailedPreconditionError",
    "UnknownError",
})  # fmt: skip
_SIGNS = re.compile(
    r"collective ops? (is|are|was|were) aborted|\b(peer|task|worker)s?\b[^\n]*\b(unhealthy|is down|died|preempted)"
    r"|connection (reset|refused)|socket closed|failed to connect to|coordination ?service|heartbeat|DerivedStatus"
    r"|nccl[^\n]*(unhandled system error|remote process exited|remote error|connection closed)"
    r"|derived_status|/job:\w+/replica:\d+/task:\d+[^\n]*(has been restarted|is not available)",
    re.IGNORECASE,
)


def classify(error: BaseException) -> bool:
    """Tell whether an error only follows the death of another worker.

    Source: what survivors of a killed, frozen or unreachable peer raised under MultiWorkerMirroredStrategy
    (TensorFlow 2.12 to 2.21), and Horovod's own error.
    """
    seen: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if seen is None:
            break
        names = {kind.__name__ for kind in type(seen).__mro__ if kind.__module__.split(".")[0] in _ERROR_PACKAGES}
        if names & _ALWAYS_VICTIMS or (names & _SOMETIMES_VICTIMS and _SIGNS.search(str(seen))):
            return True
        seen = seen.__cause__
    return False


def describe(error: BaseException, rank: int, generation: int, step: int) -> dict[str, Any]:
    """Return what the failure file says about an error; message and traceback are cut to a bounded length."""
    shown = traceback.TracebackException(type(error), error, error.__traceback__)  # bears a __str__ that raises
    text = "".join(shown.format())
    return {
        "type": type(error).__qualname__,
        "module": type(error).__module__,
        "message": str(shown)[:_MESSAGE_CHARACTERS_MAX],
        "traceback": text[-_TRACEBACK_CHARACTERS_MAX:],
        "rank": rank,
        "generation": generation,
        "step": step,
        "time_unix": time.time(),
        "victim": classify(error),
    }


def silence(rank: int, generation: int) -> dict[str, Any]:
    """Return what a failure file says of a rank that has ended without a word of its own."""
    said = {"type": "", "module": "", "message": "", "traceback": "", "step": 0, "victim": False}
    return {**said, "rank": rank, "generation": generation, "time_unix": time.time()}


def write(path: str, description: dict[str, Any]) -> None:
    """Put a description where the agent looks for it, whole or not at all; that it can not be is no second error."""
    temporary = f"{path}.{os.getpid()}"
    try:
        # half a surrogate pair, as of a file's name, is nothing to pass on
        with open(temporary, "w", encoding="utf-8", errors="replace") as file:
            json.dump(description, file, ensure_ascii=False)
        os.replace(temporary, path)
    except OSError:
        return
