"""What a host says of itself, in Prometheus' words: made anew at each scrape, of the newest sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from keepstep.core.host_sample import StrainKind
from keepstep.ports import HostSample

Rows = Iterable[tuple[tuple[str, ...], float | None]]


class HostMetrics(Collector):
    """The `keepstep_host_` series of an agent: the kernel's own counters, which begin with the machine.

    Labels come from closed sets: kinds of strains, the folders that are watched, this machine's devices.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sample = HostSample(0.0)
        self._strained: Collection[StrainKind] = ()
        registry.register(self)

    def host(self, sample: HostSample, strained: Collection[StrainKind]) -> None:
        """Show a sample from now on, and what strains the host."""
        self._sample, self._strained = sample, strained

    def collect(self) -> Iterator[Metric]:
        """All series; those that the host does not tell are empty."""
        sample = self._sample
        kinds = [((kind.value,), float(kind in self._strained)) for kind in StrainKind]
        yield _gauge("strained", "1 for each kind of thing that strains this host.", kinds, ("kind",))
        yield from _of_processors(sample)
        yield from _of_memory(sample)
        yield from _of_disks(sample)
        yield from _of_the_rest(sample)
        yield from _of_network(sample)


def _of_processors(sample: HostSample) -> Iterator[Metric]:
    uses = {
        "all": sample.cpu_s, "idle": sample.cpu_idle_s, "stolen": sample.cpu_stolen_s, "own": sample.own_cpu_s,
    }  # fmt: skip
    yield _counter("cpu_seconds", "Time of the processors that the job may use, by use.", _named(uses), ("use",))
    yield _counter("cpu_throttled_seconds", "Processor time that a quota withheld.", _one(sample.throttled_s))
    waits = {"cpu": sample.cpu_waited_s, "memory": sample.memory_waited_s, "io": sample.io_waited_s}
    text = "Time in which something waited for a resource (PSI, some)."
    yield _counter("waited_seconds", text, _named(waits), ("resource",))
    yield _gauge("load", "Mean length of the machine's run queue over a minute.", _one(sample.load))


def _of_memory(sample: HostSample) -> Iterator[Metric]:
    yield _gauge("memory_used_bytes", "Used by the container, without idle file pages.", _one(sample.memory_used_bytes))
    yield _gauge("memory_limit_bytes", "What the container may use.", _one(sample.memory_limit_bytes))
    yield _gauge("memory_available_bytes", "What the machine can still give.", _one(sample.memory_available_bytes))
    yield _gauge("memory_size_bytes", "What the machine has.", _one(sample.memory_total_bytes))
    yield _counter("oom_kills", "Processes killed for want of memory.", _one(sample.oom_kills))


def _of_disks(sample: HostSample) -> Iterator[Metric]:
    folder = ("folder",)
    answered = [disk for disk in sample.disks if not disk.silent_s]
    free = [((disk.folder,), disk.free_bytes) for disk in answered]
    yield _gauge("disk_free_bytes", "Room left in a folder that the job writes to.", free, folder)
    sizes = [((disk.folder,), disk.size_bytes) for disk in answered]
    yield _gauge("disk_size_bytes", "Size of its file system.", sizes, folder)
    files = [((disk.folder,), disk.files_free) for disk in answered if disk.files]
    yield _gauge("disk_files_free", "How many more files it has room for.", files, folder)
    fixed = [((disk.folder,), int(disk.read_only)) for disk in answered]
    yield _gauge("disk_read_only", "1 if it can only be read.", fixed, folder)
    silent = [((disk.folder,), disk.silent_s) for disk in sample.disks]
    yield _gauge("disk_silent_seconds", "For how long it has not answered.", silent, folder)
    errors = [((name,), count) for name, count in sample.disk_errors]
    yield _counter("disk_errors", "Errors that a file system has met.", errors, ("device",))


def _of_the_rest(sample: HostSample) -> Iterator[Metric]:
    offset_s = None if sample.unix_s is None else sample.unix_s - sample.at
    yield _gauge("clock_offset_seconds", "Real time less monotonic time: changes as it is set.", _one(offset_s))
    held = [((each.holder,), each.open) for each in sample.descriptors]
    yield _gauge("open_files", "Files open: the agent's, its fullest process's, the host's.", held, ("holder",))
    most = [((each.holder,), each.limit) for each in sample.descriptors]
    yield _gauge("open_files_max", "How many may be open.", most, ("holder",))
    yield _counter("thermal_slowdowns", "Processors slowed down for heat.", _one(sample.thermal_slowdowns))
    yield _gauge("temperature_celsius", "Of the part that is nearest to its bound.", _one(sample.temperature_c))


def _of_network(sample: HostSample) -> Iterator[Metric]:
    interface = ("interface",)
    packets = [((each.name,), each.packets) for each in sample.interfaces]
    yield _counter("interface_packets", "Packets of a network interface.", packets, interface)
    errors = [((each.name,), each.errors) for each in sample.interfaces]
    yield _counter("interface_errors", "Errors of a network interface.", errors, interface)
    drops = [((each.name,), each.drops) for each in sample.interfaces]
    yield _counter("interface_drops", "Packets that a network interface dropped.", drops, interface)
    segments = {"sent": sample.tcp_sent, "resent": sample.tcp_resent}
    yield _counter("tcp_segments", "TCP segments sent, and sent again.", _named(segments), ("how",))
    events = [((each.name, name), count) for each in sample.fabrics for name, count in each.counters]
    yield _counter("fabric_events", "Counters of EFA and InfiniBand ports.", events, ("port", "counter"))


def _one(value: float | None) -> Rows:
    return [((), value)]


def _named(values: dict[str, float | None] | dict[str, int | None]) -> Rows:
    return [((name,), value) for name, value in values.items()]


def _gauge(name: str, text: str, rows: Rows, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"keepstep_host_{name}", text, labels=labels), rows)


def _counter(name: str, text: str, rows: Rows, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"keepstep_host_{name}", text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        if value is not None:
            family.add_metric(labels, value)
    return family
