"""Workers as processes of this host, and what they print.

What lives here: starting, watching and stopping processes; the threads that pass their output on. What must never
enter: a decision about what an exit means or what comes next. Start reading at `host.ProcessHost`.
"""

from __future__ import annotations

from keepstep.adapters.processes.host import (
    ExitStatus,
    ProcessHost,
    Started,
    StopTimeout,
    WorkerProcess,
    WorkerSpec,
    discard,
    launch,
)
from keepstep.adapters.processes.output import LineQueue, LineSink, standard_sinks

__all__ = [
    "ExitStatus",
    "LineQueue",
    "LineSink",
    "ProcessHost",
    "Started",
    "StopTimeout",
    "WorkerProcess",
    "WorkerSpec",
    "discard",
    "launch",
    "standard_sinks",
]
