"""What a host says of itself, and what strains it.

Counters only ever grow; None, or nothing, where the host does not tell.
"""

from __future__ import annotations

from enum import StrEnum

from keepstep.core.values import frozen


@frozen
class Disk:
    """The file system of a folder that the job writes to; `silent_s`: for so long it has not answered at all."""

    folder: str
    size_bytes: int = 0
    free_bytes: int = 0
    files: int = 0
    """How many files it has room for in all, 0 where that is not limited."""
    files_free: int = 0
    read_only: bool = False
    silent_s: float = 0.0


@frozen
class Descriptors:
    """Open files against what may be open, of a `holder`: agent, worker (the fullest process of the job) or host."""

    holder: str
    open: int
    limit: int


@frozen
class Interface:
    """A network interface, since it is up; both directions together."""

    name: str
    packets: int
    errors: int
    drops: int


@frozen
class Fabric:
    """A port of an EFA or InfiniBand device: what it counts of what should not happen, and packets sent, by name."""

    name: str
    counters: tuple[tuple[str, int], ...]


@frozen
class HostSample:
    """One look at a host.

    Attributes:
        at: CLOCK_MONOTONIC, seconds; `unix_s` is CLOCK_REALTIME at the same moment.
        processors: how many the job may use; the times of `cpu_` are sums over these.
        cpu_s: all time that there was, idle time and what other guests took included.
        own_cpu_s: what the job's processes used; `group_cpu_s` what its control group did.
        throttled_s: processor time that the quota of the control group withheld.
        cpu_waited_s: time in which something that could run waited for a processor; `memory_` and `io_` likewise.
        load: mean length of the machine's run queue over a minute.
        memory_used_bytes: by the control group, without file pages that it would give back; of `memory_limit_bytes`.
        memory_available_bytes: what the machine can still give; of `memory_total_bytes`.
        oom_kills: processes killed for want of memory.
        disk_errors: errors by file system.
        thermal_slowdowns: how often processors were slowed down because they were hot.
        temperature_c: of the hottest part, by how near it is to what is too hot for it: `temperature_max_c`.
        tcp_sent: segments, without those sent again: `tcp_resent`.
    """

    at: float
    unix_s: float | None = None
    processors: int | None = None
    cpu_s: float | None = None
    cpu_idle_s: float | None = None
    cpu_stolen_s: float | None = None
    own_cpu_s: float | None = None
    group_cpu_s: float | None = None
    throttled_s: float | None = None
    cpu_waited_s: float | None = None
    memory_waited_s: float | None = None
    io_waited_s: float | None = None
    load: float | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    oom_kills: int | None = None
    disks: tuple[Disk, ...] = ()
    disk_errors: tuple[tuple[str, int], ...] = ()
    descriptors: tuple[Descriptors, ...] = ()
    thermal_slowdowns: int | None = None
    temperature_c: float | None = None
    temperature_max_c: float | None = None
    interfaces: tuple[Interface, ...] = ()
    tcp_sent: int | None = None
    tcp_resent: int | None = None
    fabrics: tuple[Fabric, ...] = ()


class StrainKind(StrEnum):
    """What can strain a host, in the order in which it is told."""

    CPU_QUOTA = "cpu_quota"
    CPU_STEAL = "cpu_steal"
    CPU_NEIGHBOURS = "cpu_neighbours"
    MEMORY_WAIT = "memory_wait"
    IO_WAIT = "io_wait"
    MEMORY_SHORT = "memory_short"
    OOM_KILLS = "oom_kills"
    DISK_SHORT = "disk_short"
    DISK_FILES = "disk_files"
    DISK_READ_ONLY = "disk_read_only"
    DISK_SILENT = "disk_silent"
    DISK_ERRORS = "disk_errors"
    CLOCK_STEP = "clock_step"
    DESCRIPTORS = "descriptors"
    THERMAL = "thermal"
    INTERFACE = "interface"
    TCP_RESENT = "tcp_resent"
    FABRIC = "fabric"


@frozen
class Strain:
    """One thing that strains a host; `what` tells several of a kind apart, `figure` is the number in the text."""

    kind: StrainKind
    what: str
    figure: float
    text: str


@frozen
class Told:
    """A strain as it is told; its figure was last near to what is told at `near_at`, and it was last seen at `seen_at`.

    Both are seconds on the samples' clock.
    """

    strain: Strain
    near_at: float
    seen_at: float
