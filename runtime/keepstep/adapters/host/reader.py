"""One look at this host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from keepstep.adapters.clock import monotonic, unix_time
from keepstep.adapters.host import devices, groups, network, processors
from keepstep.adapters.host.disks import Disks
from keepstep.adapters.host.files import numbers_of, text_of
from keepstep.core.host_sample import HostSample

_AT_ONCE_S = 0.02
_TRIES = 3
_CONTROLLERS = ("cpu", "cpuacct", "memory")

Clocks = tuple[Callable[[], float], Callable[[], float]]


class HostReader:
    """Reads below a root folder: `/`, or what a test has laid out like it."""

    def __init__(
        self,
        disks: Disks,
        *,
        root: Path = Path("/"),
        agent: int | None = None,
        eldest: int | None = None,
        clocks: Clocks = (monotonic, unix_time),
    ) -> None:
        """Args:
        agent: whose groups and descriptors are read; this process by default.
        eldest: the process that all of the job descend from; this process's parent by default.
        clocks: CLOCK_MONOTONIC and CLOCK_REALTIME.
        """
        self._disks, self._root, self._clocks = disks, root, clocks
        self._proc, self._system = root / "proc", root / "sys"
        self._agent = os.getpid() if agent is None else agent
        self._eldest = os.getppid() if eldest is None else eldest
        self._ticks = os.sysconf("SC_CLK_TCK")

    def read(self) -> HostSample:
        """Look once. Takes milliseconds, or as long as a driver that is asked for its counters; not for the loop."""
        at, unix_s = self._read_clocks()
        proc, system = self._proc, self._system
        family = processors.family_of(proc, self._eldest, self._ticks)
        times = processors.times_of(proc, self._usable(), self._ticks)
        cpu, accounts, memory = (groups.find_group(name, self._root, str(self._agent)) for name in _CONTROLLERS)
        used, limit = (None, None) if memory is None else groups.memory_of(memory)
        available, total = devices.machine_memory(proc)
        killed = None if memory is None else groups.oom_kills(memory)
        sent, resent = network.segments_of(proc)
        heat, heat_max = devices.heat_of(system)
        return HostSample(
            at=at,
            unix_s=unix_s,
            processors=None if times is None else times.processors,
            cpu_s=None if times is None else times.whole_s,
            cpu_idle_s=None if times is None else times.idle_s,
            cpu_stolen_s=None if times is None else times.stolen_s,
            own_cpu_s=sum(process.used_s for process in family) if family else None,
            group_cpu_s=None if cpu is None else groups.used_s(cpu, accounts),
            throttled_s=None if cpu is None else groups.throttled_s(cpu),
            cpu_waited_s=self._waited("cpu", cpu),
            memory_waited_s=self._waited("memory", memory),
            io_waited_s=self._waited("io", cpu),
            load=processors.load_of(proc),
            memory_used_bytes=used,
            memory_limit_bytes=limit,
            memory_available_bytes=available,
            memory_total_bytes=total,
            oom_kills=devices.machine_oom_kills(proc) if killed is None else killed,
            disks=self._disks.look(at),
            disk_errors=devices.disk_errors_of(system),
            descriptors=devices.descriptors_of(proc, self._agent, [process.pid for process in family]),
            thermal_slowdowns=devices.slowdowns_of(system),
            temperature_c=heat,
            temperature_max_c=heat_max,
            interfaces=network.interfaces_of(proc),
            tcp_sent=sent,
            tcp_resent=resent,
            fabrics=network.fabrics_of(system),
        )

    def _read_clocks(self) -> tuple[float, float | None]:
        """Both clocks at one moment; who was stopped between the two would believe that one was set."""
        read_monotonic, read_unix = self._clocks
        for _ in range(_TRIES):
            at, unix_s, later = read_monotonic(), read_unix(), read_monotonic()
            if later - at <= _AT_ONCE_S:
                return at, unix_s
        return read_monotonic(), None

    def _waited(self, what: str, group: groups.Group | None) -> float | None:
        """Pressure on the control group, where it has a measure of its own, else on the machine."""
        places = [] if group is None or group.version == 1 else [group.folders[0] / f"{what}.pressure"]
        for place in (*places, self._proc / "pressure" / what):
            found = processors.waited_s(place)
            if found is not None:
                return found
        return None

    def _usable(self) -> frozenset[int]:
        """The processors that the agent may run on, as its workers may."""
        for line in text_of(self._proc / str(self._agent) / "status").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return numbers_of(line.partition(":")[2])
        return frozenset()
