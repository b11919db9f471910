"""`/metrics` of one agent: what is counted and observed, in Prometheus' words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from keepstep.core.preflight_records import Check
from keepstep.core.splits import Part, Split
from keepstep.ports import GpuSample

CHECKS = tuple(check.value for check in Check)
RECOVERY_PHASES = ("detect", "stop", "agree", "start", "restore", "first_step", "total")
OUTCOMES = ("equal", "corrupt", "nothing")
SCRIPT_METRICS_MAX = 64
ECC_KINDS = ("corrected", "uncorrected")

# A recovery takes about a second where the machine survives and minutes where TensorFlow is imported on a cold disk.
_RECOVERY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_SNAPSHOT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_COMMIT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """All metrics of an agent, in a registry of their own, and the server that shows them.

    Labels come from closed sets: causes as given at the start, phases as above, ranks of the present world, GPUs of
    this host; of the names that a script reports so many are kept.
    """

    def __init__(self, host: str, port: int, causes: Iterable[str]) -> None:
        """Serve at once.

        Args:
            host: address to listen on.
            port: 0 takes any free one; see `port`.
            causes: every value that a restart's cause can have.

        Raises:
            OSError: the address can not be listened on.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        self._make_progress(causes)
        self._make_times()
        self._make_gpus()
        self._server, self._thread = start_http_server(port, host, self._registry)
        self.up(True)

    @property
    def registry(self) -> CollectorRegistry:
        """Where other series are added to those of this agent."""
        return self._registry

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving; counts are kept, but nobody can read them any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def up(self, up: bool) -> None:
        """Tell whether this agent is part of the job: up until it leaves."""
        self._up.set(int(up))

    def step(self, step: int) -> None:
        """Show the newest step that a worker of this host has completed."""
        self._step.set(step)

    def durable_step(self, step: int) -> None:
        """Show the newest step whose checkpoint is committed in the store."""
        self._durable_step.set(step)

    def generation(self, number: int) -> None:
        """Show the generation that this agent belongs to."""
        self._generation.set(number)

    def lost_steps(self, count: int) -> None:
        """Count steps that are executed again."""
        self._lost_steps.inc(count)

    def restart(self, cause: str) -> None:
        """Count a restart of the world, by the cause of the first failure.

        Raises:
            ValueError: the cause is none of those given at the start.
        """
        if cause not in self._causes:
            raise ValueError(f"{cause!r} is not a known cause")
        self._restarts.labels(cause).inc()

    def recovery(self, phase: str, seconds: float) -> None:
        """Observe one phase of a recovery.

        Raises:
            ValueError: there is no such phase.
        """
        if phase not in RECOVERY_PHASES:
            raise ValueError(f"{phase!r} is not a phase of a recovery")
        self._recovery.labels(phase).observe(seconds)

    def snapshot(self, seconds: float) -> None:
        """Observe how long one snapshot held up the training."""
        self._snapshot.observe(seconds)

    def commit(self, seconds: float) -> None:
        """Observe the time from a sealed snapshot to its manifest in the store."""
        self._commit.observe(seconds)

    def checkpoint_interval(self, seconds: float) -> None:
        """Show how far apart checkpoints are; never called where the policy counts steps."""
        self._checkpoint_interval.set(seconds)

    def committable(self, committable: bool) -> None:
        """Show whether an interruption would leave the time for a save."""
        self._committable.set(int(committable))

    def step_split(self, rank: int, split: Split) -> None:
        """Show where a rank's recent steps went: its own work, the rest between steps, waiting for peers and for data.

        Steps last equally long on all ranks, since they wait for each other: the straggler is the one whose own work
        is long and whose waiting is short.
        """
        label = str(rank)
        self._own_work.labels(label).set(split.compute_s)
        self._wait.labels(label).set(split.wait_s)
        self._data_wait.labels(label).set(split.data_s)
        self._rest.labels(label).set(split.rest_s)

    def straggler(self, rank: int, part: Part, cost_ratio: float) -> None:
        """Show what a straggler costs, by the part of the step that it is slow in; 0 once it is none any more."""
        self._straggler.labels(str(rank), part.value).set(cost_ratio)

    def straggler_wait(self, rank: int, seconds: float) -> None:
        """Count what all have waited for a straggler since this was told last."""
        self._straggler_wait.labels(str(rank)).inc(seconds)

    def slow_once(self, rank: int) -> None:
        """Count that a rank was slow for a while and is not any more, before it was called a straggler."""
        self._slow_once.labels(str(rank)).inc()

    def script_metric(self, rank: int, name: str, value: float) -> None:
        """Show a number that the script has reported; the first SCRIPT_METRICS_MAX names are kept."""
        if name in self._script_names or len(self._script_names) < SCRIPT_METRICS_MAX:
            self._script_names.add(name)
            self._script.labels(str(rank), name).set(value)

    def forget_ranks(self) -> None:
        """Drop what was shown per rank: ranks mean nothing beyond their generation."""
        for gauge in (self._own_work, self._wait, self._data_wait, self._rest, self._straggler, self._script):
            gauge.clear()
        self._script_names.clear()

    def journal_dropped(self, count: int) -> None:
        """Count journal entries that could not be written."""
        self._journal_dropped.inc(count)

    def store_available(self, available: bool) -> None:
        """Show whether the last use of the store succeeded."""
        self._store_available.set(int(available))

    def preflight_flaw(self, check: str) -> None:
        """Count what was found wrong with a host before it trained, or as it began to.

        Raises:
            ValueError: there is no such check.
        """
        if check not in CHECKS:
            raise ValueError(f"{check!r} is not a check of a preflight")
        self._preflight_flaws.labels(check).inc()

    def replica_divergence(self) -> None:
        """Count a difference between replicas that have to be identical: silent corruption."""
        self._replica_divergence.inc()

    def repeated_step(self, outcome: str) -> None:
        """Count a step that was done again on other hosts: equal, corrupt, or nothing where that said nothing.

        Raises:
            ValueError: it is none of these.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"{outcome!r} is not what comes of a repeated step")
        self._repeated_steps.labels(outcome).inc()

    def goodput(self, seconds: Mapping[str, float]) -> None:
        """Show where this host's time went, in seconds by bucket; they add up to wall time."""
        for bucket, value in seconds.items():
            self._goodput.labels(bucket).set(value)

    def gpus(self, samples: Iterable[GpuSample]) -> None:
        """Show a poll of this host's GPUs; what a GPU does not tell is absent."""
        for gauge in self._gpu_gauges.values():
            gauge.clear()
        self._gpu_ecc.clear()
        self._gpu_throttled.clear()
        for sample in samples:
            shown = {
                "lost": int(sample.lost),
                "temperature": sample.temperature_c,
                "power": sample.power_w,
                "memory": sample.memory_used_bytes,
                "remap_failed": None if sample.remap_failed is None else int(sample.remap_failed),
                "repair_pending": None if sample.repair_pending is None else int(sample.repair_pending),
                "repair_wanted": int(bool(sample.recovery)),
                "retired_pages": sample.retired_pages,
                "clock": None if sample.clock_mhz is None else sample.clock_mhz * 1e6,
                "links_down": sample.links_down,
                "link_errors": sample.link_errors,
                "pcie_replays": sample.pcie_replays,
                "foreign": sample.foreign_bytes,
            }
            for name, value in shown.items():
                if value is not None:
                    self._gpu_gauges[name].labels(sample.uuid).set(value)
            for kind, count in zip(ECC_KINDS, (sample.ecc_corrected, sample.ecc_uncorrected), strict=True):
                if count is not None:
                    self._gpu_ecc.labels(sample.uuid, kind).set(count)
            for reason in sample.throttle:
                self._gpu_throttled.labels(sample.uuid, reason).set(1)
            for xid in sample.xids:
                self._gpu_xids.labels(sample.uuid, str(xid)).inc()

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"keepstep_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"keepstep_{name}", text, labels, registry=self._registry)

    def _make_progress(self, causes: Iterable[str]) -> None:
        self._up = self._gauge("up", "1 while this agent is part of the job.")
        self._step = self._gauge("step", "Newest optimizer step completed on this host.")
        self._durable_step = self._gauge("durable_step", "Newest step whose checkpoint is committed in the store.")
        self._generation = self._gauge("generation", "Generation of the world that this agent belongs to.")
        self._store_available = self._gauge("store_available", "1 if the last use of the checkpoint store succeeded.")
        self._lost_steps = self._counter("lost_steps_total", "Steps executed again after a restart.")
        self._restarts = self._counter("restarts_total", "Restarts of the world, by cause.", ("cause",))
        self._causes = frozenset(causes)
        for cause in sorted(self._causes):
            self._restarts.labels(cause)
        self._journal_dropped = self._counter("journal_dropped_total", "Journal entries that could not be written.")
        self._preflight_flaws = self._counter(
            "preflight_flaws_total", "What was found wrong with hosts before they trained, by check.", ("check",)
        )
        for check in CHECKS:
            self._preflight_flaws.labels(check)
        self._replica_divergence = self._counter(
            "replica_divergence_total", "Differences found between replicas that have to be identical."
        )
        self._repeated_steps = self._counter(
            "repeated_steps_total", "Steps that were done again on other hosts, by what came of it.", ("outcome",)
        )
        for outcome in OUTCOMES:
            self._repeated_steps.labels(outcome)

    def _make_times(self) -> None:
        self._goodput = self._gauge(
            "goodput_seconds", "Where this host's time went, in all attempts so far; adds up to wall time.", ("bucket",)
        )
        self._recovery = Histogram(
            "keepstep_recovery_seconds",
            "From a fault to the first step completed after it, by phase.",
            ("phase",),
            buckets=_RECOVERY_BUCKETS_S,
            registry=self._registry,
        )
        for phase in RECOVERY_PHASES:
            self._recovery.labels(phase)
        self._snapshot = Histogram(
            "keepstep_snapshot_seconds",
            "How long a snapshot holds up the training.",
            buckets=_SNAPSHOT_BUCKETS_S,
            registry=self._registry,
        )
        self._commit = Histogram(
            "keepstep_commit_seconds",
            "From a sealed snapshot to its manifest in the store.",
            buckets=_COMMIT_BUCKETS_S,
            registry=self._registry,
        )
        self._checkpoint_interval = self._gauge("checkpoint_interval_seconds", "Time between checkpoints in the store.")
        self._committable = self._gauge(
            "committable_within_grace", "1 if an interruption would leave the time to save the newest step."
        )
        for unknown in (self._checkpoint_interval, self._committable):
            unknown.set(math.nan)
        self._own_work = self._gauge("own_work_seconds", "Mean time of a recent step in own work.", ("rank",))
        self._wait = self._gauge("wait_seconds", "Mean time of a recent step spent waiting for peers.", ("rank",))
        self._data_wait = self._gauge("data_wait_seconds", "Mean time of a recent step waiting for data.", ("rank",))
        self._rest = self._gauge("step_rest_seconds", "Mean time between two recent steps.", ("rank",))
        self._straggler = self._gauge(
            "straggler_cost_ratio",
            "Share of a step that a straggler costs, as the leader sees it.",
            ("rank", "part"),
        )
        self._straggler_wait = self._counter(
            "straggler_wait_seconds_total", "Time that all have waited for a straggler.", ("rank",)
        )
        self._slow_once = self._counter("slow_for_once_total", "Times that a rank was slow for a moment.", ("rank",))
        self._script = self._gauge("script_metric", "What the script has reported by log_metric.", ("rank", "name"))
        self._script_names: set[str] = set()

    def _make_gpus(self) -> None:
        gpu = ("gpu",)
        self._gpu_gauges = {
            "lost": self._gauge("gpu_lost", "1 if the driver has lost the device.", gpu),
            "temperature": self._gauge("gpu_temperature_celsius", "Temperature of the GPU.", gpu),
            "power": self._gauge("gpu_power_watts", "Power drawn by the board.", gpu),
            "memory": self._gauge("gpu_memory_used_bytes", "Device memory in use.", gpu),
            "remap_failed": self._gauge("gpu_remap_failed", "1 if a memory row could not be remapped.", gpu),
            "repair_pending": self._gauge("gpu_repair_pending", "1 if a repair of memory waits for a reset.", gpu),
            "repair_wanted": self._gauge("gpu_repair_wanted", "1 if the driver wants the device repaired.", gpu),
            "retired_pages": self._gauge("gpu_retired_pages", "Pages of device memory retired for good.", gpu),
            "clock": self._gauge("gpu_clock_hertz", "Clock of the streaming multiprocessors.", gpu),
            "links_down": self._gauge("gpu_nvlinks_down", "NVLinks that are not active.", gpu),
            "link_errors": self._gauge("gpu_nvlink_errors", "Errors of all NVLinks since the driver was loaded.", gpu),
            "pcie_replays": self._gauge("gpu_pcie_replays", "PCIe replays since the driver was loaded.", gpu),
            "foreign": self._gauge("gpu_foreign_memory_bytes", "Device memory of processes of others.", gpu),
        }
        # Set from the driver's own count, which starts again with the driver: a gauge, whatever it counts.
        self._gpu_ecc = self._gauge(
            "gpu_ecc_errors", "Memory errors since the driver was loaded, by kind.", ("gpu", "kind")
        )
        self._gpu_throttled = self._gauge(
            "gpu_throttled", "1 for each reason that holds the clocks down.", ("gpu", "reason")
        )
        self._gpu_xids = self._counter("gpu_xids_total", "Xid errors seen, by number.", ("gpu", "xid"))
