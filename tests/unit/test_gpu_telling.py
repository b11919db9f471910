"""Of all that GPUs say, the core hears what is new or wrong: the journal stays small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.app.gpu_memory import GpuMemory
from keepstep.app.gpus import GpuWatch, Telling
from keepstep.core.events import GpusSampled
from keepstep.intake.policy import load_policy
from keepstep.ports import GpuSample

WELL = GpuSample("GPU-a", 0, temperature_c=60.0, power_w=300.0, ecc_corrected=5, pcie_replays=9)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def telling() -> tuple[Telling, Clock]:
    clock = Clock()
    return Telling(load_policy("default").health.gpu, clock), clock


def test_what_varies_with_the_load_is_told_once():
    tell, clock = telling()
    assert tell.news([WELL]) == (WELL,)
    for step in range(100):
        clock.now += 5.0
        busy = {"power_w": 300.0 + step, "temperature_c": 60.0 + step % 30, "clock_mhz": 1500 + step}
        assert tell.news([replace(WELL, throttle=("sw_power_cap",) * (step % 2), **busy)]) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"lost": True}, {"ecc_uncorrected": 1}, {"remap_failed": True}, {"repair_pending": True}, {"links_down": 1},
        {"recovery": "gpu_reset"}, {"xids": (13,)}, {"temperature_c": 93.0}, {"throttle": ("hw_slowdown",)},
    ],
)  # fmt: skip
def test_what_changes_or_is_wrong_is_told_at_once(changes):
    tell, _ = telling()
    other = GpuSample("GPU-b", 1)
    tell.news([WELL, other])
    changed = replace(WELL, **changes)
    assert tell.news([changed, other]) == (changed,)


def test_heat_is_told_each_time_and_its_end_once():
    tell, _ = telling()
    hot = replace(WELL, temperature_c=95.0)
    assert [len(tell.news([sample])) for sample in (WELL, hot, hot, WELL, WELL)] == [1, 1, 1, 1, 0]


def test_counters_that_count_on_and_on_are_told_once_a_minute():
    tell, clock = telling()
    told = 0
    for step in range(120):
        told += len(tell.news([replace(WELL, pcie_replays=9 + step)]))
        clock.now += 5.0
    assert told == 1 + 600 / 60


def test_a_slowdown_that_comes_and_goes_is_over_once_it_has_not_come_for_a_minute():
    tell, clock = telling()
    slow = replace(WELL, throttle=("hw_thermal_slowdown",))
    told = []
    for sample in (WELL, slow, WELL, slow, WELL):
        told.append(len(tell.news([sample])))
        clock.now += 5.0
    assert told == [1, 1, 0, 0, 0]
    clock.now += 60.0
    assert tell.news([WELL]) == (WELL,)
    assert tell.news([WELL]) == ()


class Sink:
    def __init__(self) -> None:
        self.shown: list[tuple[GpuSample, ...]] = []

    def gpus(self, samples) -> None:
        self.shown.append(tuple(samples))


def test_silence_is_told_once_and_so_is_its_end():
    sink, posted, said = Sink(), [], []
    watch = GpuWatch(load_policy("default"), sink, GpuMemory(said.append), posted.append, said.append)
    watch._tell([WELL])
    watch._fall_silent("no word for 20 s")
    watch._fall_silent("no word for 60 s")
    watch._tell([WELL])
    watch._tell([WELL])
    assert posted == [GpusSampled((WELL,)), GpusSampled((), silent=True), GpusSampled(())]
    assert sink.shown == [(WELL,), (), (WELL,), (WELL,)]
    assert said == ["the GPU driver does not answer: no word for 20 s"]


def test_a_gpu_that_is_lost_between_two_probes_is_known_by_its_place():
    watch = GpuWatch(load_policy("default"), Sink(), GpuMemory(print), lambda _: None, lambda _: None)
    assert watch._named(WELL) == WELL
    assert watch._named(GpuSample("index-0", 0, lost=True)) == GpuSample("GPU-a", 0, lost=True)
    assert watch._named(GpuSample("index-1", 1, lost=True)) == GpuSample("index-1", 1, lost=True)
