"""Workers as processes of this host, and what they print.

What lives here: starting, watching and stopping processes; the threads that pass their output on. What must never
enter: a decision about what an exit means or what comes next. Start reading at `host.ProcessHost`.
"""

from __future__ import annotations

from keepstep.adapters.processes.host import ExitStatus, ProcessHost, StopTimeout, WorkerProcess
from keepstep.adapters.processes.output import LineQueue, LineSink, standard_sinks
from keepstep.adapters.processes.starting import (
    Orphan,
    Pumps,
    Started,
    WorkerSpec,
    copied,
    discard,
    is_child,
    is_dead,
    launch,
)

__all__ = [
    "ExitStatus",
    "LineQueue",
    "LineSink",
    "Orphan",
    "ProcessHost",
    "Pumps",
    "Started",
    "StopTimeout",
    "WorkerProcess",
    "WorkerSpec",
    "copied",
    "discard",
    "is_child",
    "is_dead",
    "launch",
    "standard_sinks",
]
