"""What a scrape of `/metrics` shows."""

from __future__ import annotations

import math
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepstep.adapters.prometheus import CHECKS, OUTCOMES, RECOVERY_PHASES, SCRIPT_METRICS_MAX, Metrics
from keepstep.core.splits import Split
from keepstep.ports import GpuSample

CAUSES = ("user_code", "hang")


@pytest.fixture
def metrics():
    made = Metrics("127.0.0.1", 0, CAUSES)
    yield made
    made.close()


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(shown, name: str, /, **labels: str) -> float | None:
    return shown.get((f"keepstep_{name}", tuple(sorted(labels.items()))))


def test_what_is_counted_stands_at_zero_from_the_start(metrics):
    shown = scrape(metrics)
    assert value(shown, "up") == 1
    assert {name for name, _ in shown if not name.startswith("keepstep_")} == set()
    for name in ("step", "durable_step", "generation", "lost_steps_total", "journal_dropped_total", "store_available"):
        assert value(shown, name) == 0, name
    assert {cause: value(shown, "restarts_total", cause=cause) for cause in CAUSES} == dict.fromkeys(CAUSES, 0)
    assert {value(shown, "preflight_flaws_total", check=check) for check in CHECKS} == {0}
    assert {value(shown, "recovery_seconds_count", phase=phase) for phase in RECOVERY_PHASES} == {0}
    assert value(shown, "snapshot_seconds_count") == value(shown, "commit_seconds_count") == 0
    for name in ("checkpoint_interval_seconds", "committable_within_grace"):
        assert math.isnan(value(shown, name)), name  # not known yet


def test_the_pace_of_checkpoints(metrics):
    metrics.checkpoint_interval(61.5)
    metrics.committable(False)
    shown = scrape(metrics)
    assert value(shown, "checkpoint_interval_seconds") == 61.5
    assert value(shown, "committable_within_grace") == 0


def test_progress(metrics):
    metrics.step(120)
    metrics.durable_step(100)
    metrics.generation(3)
    metrics.lost_steps(4)
    metrics.lost_steps(2)
    metrics.restart("hang")
    metrics.journal_dropped(7)
    metrics.store_available(True)
    metrics.replica_divergence()
    metrics.repeated_step("equal")
    metrics.up(False)
    shown = scrape(metrics)
    assert value(shown, "step") == 120
    assert value(shown, "durable_step") == 100
    assert value(shown, "generation") == 3
    assert value(shown, "lost_steps_total") == 6
    assert value(shown, "restarts_total", cause="hang") == 1
    assert value(shown, "restarts_total", cause="user_code") == 0
    assert value(shown, "journal_dropped_total") == 7
    assert value(shown, "store_available") == 1
    assert value(shown, "replica_divergence_total") == 1
    assert [value(shown, "repeated_steps_total", outcome=outcome) for outcome in OUTCOMES] == [1, 0, 0]
    assert value(shown, "up") == 0


def test_times(metrics):
    for phase in RECOVERY_PHASES:
        metrics.recovery(phase, 0.3)
    metrics.recovery("total", 9)
    metrics.snapshot(0.004)
    metrics.commit(0.2)
    shown = scrape(metrics)
    assert value(shown, "recovery_seconds_count", phase="agree") == 1
    assert value(shown, "recovery_seconds_sum", phase="total") == pytest.approx(9.3)
    assert value(shown, "recovery_seconds_bucket", phase="total", le="0.5") == 1
    assert value(shown, "recovery_seconds_bucket", phase="total", le="15.0") == 2
    assert value(shown, "snapshot_seconds_sum") == pytest.approx(0.004)
    assert value(shown, "commit_seconds_sum") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("restart", ("bad luck",)), ("recovery", ("lunch", 1.0)), ("preflight_flaw", ("mood",)), ("repeated_step", ("",))],
)
def test_labels_come_from_closed_sets(metrics, method, arguments):
    with pytest.raises(ValueError):
        getattr(metrics, method)(*arguments)


def test_ranks_are_shown_until_their_generation_ends(metrics):
    metrics.step_split(0, Split(20, 5, data_s=0.001, compute_s=0.004, wait_s=0.011, rest_s=0.0))
    metrics.step_split(1, Split(20, 5, data_s=0.001, compute_s=0.006, wait_s=0.009, rest_s=0.0))
    shown = scrape(metrics)
    assert value(shown, "own_work_seconds", rank="1") == 0.006
    assert value(shown, "wait_seconds", rank="0") == 0.011
    assert value(shown, "data_wait_seconds", rank="0") == 0.001
    metrics.forget_ranks()
    assert not any("rank" in dict(labels) for _, labels in scrape(metrics))


def test_what_a_script_reports_is_shown_up_to_a_number_of_names(metrics):
    for number in range(SCRIPT_METRICS_MAX + 3):
        metrics.script_metric(1, f"loss_{number}", 0.1)
    metrics.script_metric(1, "loss_0", 0.25)
    shown = {labels: found for labels, found in scrape(metrics).items() if labels[0] == "keepstep_script_metric"}
    assert len(shown) == SCRIPT_METRICS_MAX
    assert value(scrape(metrics), "script_metric", rank="1", name="loss_0") == 0.25
    metrics.forget_ranks()
    assert not any(name == "keepstep_script_metric" for name, _ in scrape(metrics))
    metrics.script_metric(0, "accuracy", 0.9)
    assert value(scrape(metrics), "script_metric", rank="0", name="accuracy") == 0.9


def test_gpus_show_what_they_tell(metrics):
    metrics.gpus([GpuSample("GPU-a", 0, temperature_c=90.0), GpuSample("GPU-b", 1, lost=True)])
    metrics.gpus(
        [
            GpuSample(
                "GPU-a",
                0,
                temperature_c=61.0,
                power_w=312.5,
                memory_used_bytes=1024,
                ecc_corrected=2,
                ecc_uncorrected=0,
                remap_failed=False,
                throttle=("hw_thermal_slowdown",),
                xids=(79, 79, 63),
                repair_pending=True,
                retired_pages=2,
                clock_mhz=1755,
                links_down=1,
                link_errors=12,
                pcie_replays=7,
                recovery="gpu_reset",
                foreign_bytes=4096,
            )
        ]
    )
    shown = scrape(metrics)
    assert value(shown, "gpu_temperature_celsius", gpu="GPU-a") == 61
    assert value(shown, "gpu_power_watts", gpu="GPU-a") == 312.5
    assert value(shown, "gpu_memory_used_bytes", gpu="GPU-a") == 1024
    assert value(shown, "gpu_ecc_errors", gpu="GPU-a", kind="corrected") == 2
    assert value(shown, "gpu_ecc_errors", gpu="GPU-a", kind="uncorrected") == 0
    assert value(shown, "gpu_remap_failed", gpu="GPU-a") == 0
    assert value(shown, "gpu_lost", gpu="GPU-a") == 0
    assert value(shown, "gpu_throttled", gpu="GPU-a", reason="hw_thermal_slowdown") == 1
    assert value(shown, "gpu_xids_total", gpu="GPU-a", xid="79") == 2
    assert value(shown, "gpu_xids_total", gpu="GPU-a", xid="63") == 1
    assert value(shown, "gpu_lost", gpu="GPU-b") is None
    assert value(shown, "gpu_clock_hertz", gpu="GPU-a") == 1.755e9
    for name, wanted in (
        ("repair_pending", 1), ("repair_wanted", 1), ("retired_pages", 2), ("nvlinks_down", 1), ("nvlink_errors", 12),
        ("pcie_replays", 7), ("foreign_memory_bytes", 4096),
    ):  # fmt: skip
        assert value(shown, f"gpu_{name}", gpu="GPU-a") == wanted
    metrics.gpus([GpuSample("GPU-a", 0, lost=True)])
    shown = scrape(metrics)
    assert value(shown, "gpu_lost", gpu="GPU-a") == 1
    assert value(shown, "gpu_temperature_celsius", gpu="GPU-a") is None


def test_a_port_in_use_is_told(metrics):
    with pytest.raises(OSError):
        Metrics("127.0.0.1", metrics.port, CAUSES)
