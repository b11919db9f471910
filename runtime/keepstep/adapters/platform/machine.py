"""The machine as a container sees it: kernel, limits, folders, mounts, devices, network, clocks.

Source: proc(5), cgroups(7), the kernel's cgroup-v1 and cgroup-v2 documents, netdevice(7).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import socket
import struct
import sys
from pathlib import Path

from keepstep.adapters.clock import monotonic, unix_time

_CGROUP = Path("/sys/fs/cgroup")
_OF_VERSION = {
    2: (
        "memory.max", "memory.high", "memory.swap.max", "memory.current", "cpu.max", "cpuset.cpus.effective",
        "pids.max", "pids.current",
    ),
    1: (
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us",
        "cpuset/cpuset.cpus", "pids/pids.max", "pids/pids.current",
    ),
}  # fmt: skip
_DEVICES = ("nvidia*", "nvidia-caps/*", "infiniband/*", "neuron*", "dri/*", "fuse", "kvm")
_SIOCGIFADDR = 0x8915
_ESCAPED = re.compile(r"\\([0-7]{3})")


def kernel() -> dict[str, object]:
    """What uname says, and who reads it."""
    system = os.uname()
    names = ("sysname", "nodename", "release", "version", "machine")
    return {name: getattr(system, name) for name in names} | {"python": sys.version.split()[0]}


def cgroup(root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> dict[str, object]:
    """Version and limits of this container's control group.

    Its files lie at the root in a namespace of the container's own, and elsewhere below the group's path.

    Raises:
        OSError: there is no telling the group.
    """
    groups = own.read_text().splitlines()
    version = 2 if (root / "cgroup.controllers").exists() else 1
    unified = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), "")
    found: dict[str, object] = {}
    for name in _OF_VERSION[version]:
        folders = (root / unified, root) if version == 2 else (root,)
        for folder in folders:
            with contextlib.suppress(OSError):
                found[name] = (folder / name).read_text().strip()
                break
    return {"version": version, "groups": groups, "limits": found}


def processors() -> dict[str, object]:
    """Processors and memory, as the machine has them."""
    memory = Path("/proc/meminfo").read_text().splitlines()
    total = next((line.split()[1] for line in memory if line.startswith("MemTotal:")), "0")
    return {"count": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "memory_bytes": int(total) << 10}


def space(folder: str) -> dict[str, object]:
    """How large the file system of a folder is, and how much of it can be had.

    Raises:
        OSError: it is not there.
    """
    found = os.statvfs(folder)
    size = {"size_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}
    return {"folder": folder, "writable": os.access(folder, os.W_OK), **size, "files_free": found.f_favail}


def limits() -> dict[str, object]:
    """All resource limits, soft and hard; None for none."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    found = {name.removeprefix("RLIMIT_").lower(): resource.getrlimit(getattr(resource, name)) for name in names}
    return {name: [None if each == resource.RLIM_INFINITY else each for each in pair] for name, pair in found.items()}


def mounts(base: str, text: str) -> dict[str, object]:
    """What is mounted at and below a folder, at the root and for shared memory.

    Args:
        text: of a /proc/PID/mountinfo.
    """
    found = []
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        fields, kind = before.split(), behind.split()
        if len(fields) < 6 or len(kind) < 2:
            continue
        at = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        if at in ("/", "/dev/shm", "/tmp", base) or at.startswith(base.rstrip("/") + "/"):
            options = {"options": fields[5], "of_file_system": " ".join(kind[2:])}
            found.append({"at": at, "type": kind[0], "source": kind[1], **options})
    return {"below": base, "mounts": found}


def read_mounts(base: str) -> dict[str, object]:
    """`mounts` of this process.

    Raises:
        OSError: the kernel does not tell.
    """
    return mounts(base, Path("/proc/self/mountinfo").read_text(errors="replace"))


def devices(folder: Path = Path("/dev"), system: Path = Path("/sys")) -> dict[str, object]:
    """Device files of GPUs and of the network adapters that Elastic Fabric Adapter is made of."""
    files = sorted(str(path.relative_to(folder)) for pattern in _DEVICES for path in folder.glob(pattern))
    adapters = sorted(path.name for path in (system / "class/infiniband").glob("*"))
    found: dict[str, object] = {"files": [name for name in files if (folder / name).exists()], "infiniband": adapters}
    with contextlib.suppress(OSError, IndexError):
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return found


def interfaces(folder: Path = Path("/sys/class/net")) -> dict[str, object]:
    """Network interfaces: MTU, state and, where there is one, the address."""
    found: dict[str, object] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for path in sorted(path for path in folder.iterdir() if path.is_dir()):
            each: dict[str, object] = {"mtu": int((path / "mtu").read_text())}
            with contextlib.suppress(OSError):
                each["state"] = (path / "operstate").read_text().strip()
            with contextlib.suppress(OSError):
                request = struct.pack("256s", os.fsencode(path.name)[:15])
                each["address"] = socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])
            found[path.name] = each
    return {"interfaces": found}


def names(current_host: str) -> dict[str, object]:
    """What this host calls itself, and what that resolves to."""
    found: dict[str, object] = {"gethostname": socket.gethostname(), "current_host": current_host}
    for key, name in (("gethostname_is", socket.gethostname()), ("current_host_is", current_host)):
        try:
            found[key] = resolve(name)
        except (OSError, ValueError) as error:
            found[key] = str(error)
    return found


def resolve(host: str) -> list[str]:
    """All addresses of a host.

    Raises:
        OSError: it has none now.
        ValueError: it can not be a name.
    """
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})


def clocks() -> dict[str, object]:
    """Each clock's reading, and which boot it is of."""
    up, boot = Path("/proc/uptime").read_text().split()[0], Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found: dict[str, object] = {"monotonic_s": monotonic(), "unix_s": unix_time(), "up_s": float(up), "boot": boot}
    with contextlib.suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        found["source"] = source.read_text().strip()
    return found
