"""How much memory there is left for this process: of the host, and of its control group, version 1 or 2."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

_MEMINFO, _OWN_GROUPS, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_SPARE_RATIO = 1.5


def has_room(size_bytes: int) -> bool:
    """Whether so many bytes more, and half of that, would fit in beside what is there."""
    return left_bytes() >= _SPARE_RATIO * size_bytes


def left_bytes() -> int:
    """Return what can be had without anything being given up but files' pages; 0 where nothing says so."""
    found = [*_left_on_the_host(), *_left_in_the_group()]
    return max(0, min(found, default=0))


def _left_on_the_host() -> Iterator[int]:
    known = _pairs(_MEMINFO)
    if "MemAvailable:" in known:
        yield known["MemAvailable:"] << 10


def _left_in_the_group() -> Iterator[int]:
    for folder, limit, usage in _places():
        try:
            most = (folder / limit).read_text().strip()
            if most != "max":
                pages = _pairs(folder / "memory.stat")
                files = pages.get("inactive_file", 0) + pages.get("active_file", 0)
                yield int(most) - int((folder / usage).read_text()) + files
        except (OSError, ValueError):
            continue


@functools.lru_cache(maxsize=1)
def _places() -> tuple[tuple[Path, str, str], ...]:
    """Where the groups that this process is in say what they may use, each up to the root."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [(each, "memory.max", "memory.current") for each in _upwards(_GROUPS, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += [(each, *names) for each in _upwards(_GROUPS / "memory", path)]
    return tuple(found)


def _upwards(root: Path, path: str) -> list[Path]:
    own = root / path.strip("/")
    folders = [own, *own.parents]
    return [each for each in folders if each == root or root in each.parents]


def _pairs(path: Path) -> dict[str, int]:
    """Name and number of each line; nothing where the file can not be read."""
    try:
        words = (line.split() for line in path.read_text().splitlines())
        return {each[0]: int(each[1]) for each in words if len(each) > 1}
    except (OSError, ValueError):
        return {}
