"""Processor time and pressure: of the machine, and of the job's own processes.

Source: proc(5), the kernel's accounting/psi.rst.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from keepstep.adapters.host.files import text_of, whole
from keepstep.core.values import frozen


@frozen
class Times:
    """Seconds since the machine's start, summed over so many processors."""

    processors: int
    whole_s: float
    idle_s: float
    stolen_s: float


@frozen
class Process:
    """One process, and the time that it used, and those of its children that it has waited for."""

    pid: int
    used_s: float


def times_of(proc: Path, wanted: Collection[int], ticks: int) -> Times | None:
    """Time of the processors that the job may use.

    Args:
        wanted: their numbers; all, where it is empty.
        ticks: of a second.
    """
    rows = []
    for line in text_of(proc / "stat").splitlines():
        name, *words = line.split()
        number = whole(name.removeprefix("cpu")) if name.startswith("cpu") else None
        if number is not None and (not wanted or number in wanted):
            rows.append([whole(word) or 0 for word in words])
    if not rows or any(len(row) < 8 for row in rows):
        return None
    # the two after these, time of guests, are part of what is counted already
    return Times(
        len(rows),
        sum(sum(row[:8]) for row in rows) / ticks,
        sum(row[3] + row[4] for row in rows) / ticks,
        sum(row[7] for row in rows) / ticks,
    )


def waited_s(file: Path) -> float | None:
    """Time in which some were waiting, by a file of pressure; None where the kernel measures none."""
    for line in text_of(file).splitlines():
        if line.startswith("some "):
            total = whole(line.rpartition("total=")[2])
            return None if total is None else total / 1e6
    return None


def load_of(proc: Path) -> float | None:
    """Mean length of the run queue over a minute."""
    words = text_of(proc / "loadavg").split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return None


def family_of(proc: Path, eldest: int, ticks: int) -> list[Process]:
    """A process and all that descend from it, as far as they live.

    This goes through all processes that are in sight, so it makes little of each.
    """
    top = f"{proc}/"
    try:
        names = os.listdir(top)
    except OSError:
        return []
    children: dict[int, list[tuple[int, float]]] = {}
    family = []
    for name in names:
        if not name.isdigit():
            continue
        pid = int(name)
        try:
            # what follows the process's name, which may hold spaces and brackets
            with open(f"{top}{name}/stat", "rb", buffering=0) as file:
                words = file.read().rpartition(b")")[2].split(None, 15)
            parent, used = int(words[1]), int(words[11]) + int(words[12]) + int(words[13]) + int(words[14])
        except (OSError, ValueError, IndexError):
            continue  # gone meanwhile
        children.setdefault(parent, []).append((pid, used / ticks))
        if pid == eldest:
            family.append((pid, used / ticks))
    for pid, _ in family:  # grows as it is walked
        family += children.get(pid, [])
    return [Process(pid, used_s) for pid, used_s in family]
