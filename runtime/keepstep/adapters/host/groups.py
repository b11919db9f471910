"""The control group of a process, of either version: where its files lie, and what they say.

A container sees its own group under one of several names. In a namespace of its own the group is `/`, mounted at the
root; without one it has the name that it has outside, and is mounted at the root all the same (version 1), or below it
(version 2). So the mount's own root, which /proc/PID/mountinfo has, says what of the name is to be left out; and where
none of it is there, the group is what is mounted at the root.
Source: cgroups(7), cgroup_namespaces(7), proc(5), the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from keepstep.adapters.host.files import is_folder, number_of, table_of, text_of, whole
from keepstep.core.values import frozen

_ESCAPED = re.compile(r"\\([0-7]{3})")
_LIMIT_MAX = 1 << 60
"""Version 1 writes no limit as the largest number of whole pages."""


@frozen
class Group:
    """Where a controller has its files for a process: its own folder, then those above it as far as they are seen."""

    version: int
    name: str
    folders: tuple[Path, ...]


def find_group(controller: str, root: Path, process: str = "self") -> Group | None:
    """The group of a process for a controller; None where no hierarchy has it.

    Args:
        process: its number, or `self`.
    """
    found = _name_of(controller, text_of(root / "proc" / process / "cgroup"))
    if found is None:
        return None
    version, name = found
    default = "/sys/fs/cgroup" if version == 2 else f"/sys/fs/cgroup/{controller}"
    mounts = _mounts_of(version, controller, text_of(root / "proc" / process / "mountinfo"))
    tops = [(root / at.lstrip("/"), _below(outer, name)) for outer, at in (*mounts, ("/", default))]
    for top, inner in tops:
        if inner is not None and is_folder(top / inner):
            folder = top / inner
            return Group(version, name, (folder, *(each for each in folder.parents if each.is_relative_to(top))))
    return next((Group(version, name, (top,)) for top, _ in tops if is_folder(top)), None)


def _name_of(controller: str, text: str) -> tuple[int, str] | None:
    """Version and name, by the text of a /proc/PID/cgroup; a controller of version 1 is none of version 2."""
    unified = None
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controller in controllers.split(","):
            return 1, name
        if not controllers:
            unified = name
    return None if unified is None else (2, unified)


def _mounts_of(version: int, controller: str, text: str) -> Iterator[tuple[str, str]]:
    """Of each mount of the hierarchy: which group it shows, and where, by the text of a /proc/PID/mountinfo."""
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        fields, kind = before.split(), behind.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        ours = kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(",")
        if ours:
            yield _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(path: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), path)


def _below(outer: str, name: str) -> str | None:
    """What of a group's name is left below the group that is mounted; None where it is outside of that."""
    if ".." in name.split("/") or not (name + "/").startswith(outer.rstrip("/") + "/"):
        return None
    return name.removeprefix(outer.rstrip("/")).strip("/")


def throttled_s(group: Group) -> float | None:
    """Processor time that quotas withheld from a group and from those that it is in; None where there is no quota."""
    found = []
    for folder in group.folders:
        stat = table_of(folder / "cpu.stat")
        if "throttled_usec" in stat:
            found.append(stat["throttled_usec"] / 1e6)
        elif "throttled_time" in stat:
            found.append(stat["throttled_time"] / 1e9)
    return sum(found) if found else None


def used_s(group: Group, accounts: Group | None) -> float | None:
    """Processor time that a group used; None where another group is counted instead.

    Args:
        accounts: the group of version 1's `cpuacct`, a controller of its own that most systems mount with `cpu`.
    """
    if group.version == 2:
        used = table_of(group.folders[0] / "cpu.stat").get("usage_usec")
        return None if used is None else used / 1e6
    if accounts is None or accounts.name != group.name:
        return None
    spent = number_of(accounts.folders[0] / "cpuacct.usage")
    return None if spent is None else spent / 1e9


def memory_of(group: Group) -> tuple[int | None, int | None]:
    """Bytes used and the limit, at that level which has least left; file pages that nobody uses can be given back."""
    names = {
        2: ("memory.current", "memory.max", "inactive_file"),
        1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
    }[group.version]
    levels = []
    for folder in group.folders:
        used, limit = number_of(folder / names[0]), whole(text_of(folder / names[1]).strip())
        if used is not None:
            used = max(0, used - table_of(folder / "memory.stat").get(names[2], 0))
            levels.append((used, limit if limit is not None and limit < _LIMIT_MAX else None))
    limited = [(limit - used, used, limit) for used, limit in levels if limit is not None]
    if limited:
        _, used, limit = min(limited)
        return used, limit
    return levels[0] if levels else (None, None)


def oom_kills(group: Group) -> int | None:
    """Processes of a group that the kernel has killed for want of memory."""
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    return table_of(group.folders[0] / name).get("oom_kill")
