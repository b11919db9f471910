"""Faults that `keepstep local` inflicts on its own run: on a worker, an agent, an uploader, or a whole host."""

from __future__ import annotations

import os
import re

from keepstep import kernel
from keepstep.core.values import frozen
from keepstep.errors import ConfigError

KINDS = ("kill", "kill-agent", "kill-uploader", "kill-host")
_FAULT = re.compile(r"([a-z-]+):(\d+)@(\d+)")


@frozen
class PlannedFault:
    """What to do to which rank once it has completed a step."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}@{self.step}"


def parse_fault(text: str, hosts: int) -> PlannedFault:
    """Read `kill:RANK@STEP`.

    Raises:
        ConfigError: it is no fault, or there is no such rank.
    """
    match = _FAULT.fullmatch(text)
    if match is None or match[1] not in KINDS:
        raise ConfigError(f"{text!r}", f"KIND:RANK@STEP with KIND one of {', '.join(KINDS)}", key="--fault")
    if int(match[2]) >= hosts:
        raise ConfigError(f"rank {match[2]} of {hosts} hosts", f"a rank below {hosts}", key="--fault")
    return PlannedFault(match[1], int(match[2]), int(match[3]))


def kill_family(pid: int) -> None:
    """SIGKILL a process and all that descends from it, as a machine does that is switched off.

    Raises:
        ValueError: this process is one of them.
    """
    family = kernel.family(kernel.processes(), [pid])
    if os.getpid() in family or pid <= 1:
        raise ValueError(f"process {pid} is no host: this process descends from it")
    for member in (pid, *sorted(family)):
        kernel.kill(member)


def uploader_of(agent_pid: int) -> int | None:
    """The uploader that this agent started; None while there is none."""
    for pid, process in kernel.processes().items():
        if process.parent == agent_pid and not process.zombie and "keepstep.app.uploader" in command_of(pid):
            return pid
    return None


def command_of(pid: int) -> str:
    """A process's command line; empty for one that is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
