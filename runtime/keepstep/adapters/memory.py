"""How much memory this host, or the container on it, can still give."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without another process paying for it: of the machine, or of the container if that is less.

    Where nothing is said of either, there is room for everything.
    Source: proc(5), MemAvailable; the kernel's cgroup-v2 (memory.max, memory.current) and cgroup-v1 documents.
    """
    found = [bytes_left for bytes_left in (_of_machine(meminfo), _of_container(cgroup)) if bytes_left is not None]
    return max(0, min(found, default=1 << 62))


def _of_machine(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_container(cgroup: Path) -> int | None:
    for folder, limit, usage, file_cache in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return most - used + int(stat.get(file_cache, 0))
        except (OSError, ValueError):  # not this version; or "max", no limit
            continue
    return None
