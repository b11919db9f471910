"""Control groups of the tests' own, where this machine lets them be made."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def missing(controller: str) -> str:
    """Why no group can be made for a controller; empty where it can."""
    top = _top(controller)
    if top is None:
        return f"no control groups for {controller}"
    return "" if os.access(top, os.W_OK) else f"{top} can not be written"


@contextlib.contextmanager
def control_group(controller: str, **limits: str) -> Iterator[Path]:
    """A group with limits by the names of version 2: `cpu_max="20000 100000"`, `memory_max="64000000"`.

    Processes move into it by themselves; who is left in it at the end keeps it from being removed.
    """
    top = _top(controller)
    assert top is not None
    group = top / f"keepstep-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        if "cpu_max" in limits:
            set_quota(group, limits["cpu_max"])
        if "memory_max" in limits:
            version_2 = (group / "memory.max").exists()
            (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(limits["memory_max"])
        yield group
    finally:
        group.rmdir()


def set_quota(group: Path, cpu_max: str) -> None:
    """Give a group so many microseconds of each period: both, or `max`."""
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(cpu_max)
    else:
        quota, _, period = cpu_max.partition(" ")
        if period:
            (group / "cpu.cfs_period_us").write_text(period)
        (group / "cpu.cfs_quota_us").write_text("-1" if quota == "max" else quota)


def _top(controller: str) -> Path | None:
    """The folder in which groups with a controller are made."""
    if (ROOT / controller / "cgroup.procs").exists():
        return ROOT / controller
    try:
        given = (ROOT / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    return ROOT if controller in given else None
