"""The GPU probe without a GPU, and against a driver that is made to fail."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

import pynvml
import pytest

from keepstep.adapters import nvml
from keepstep.adapters.nvml import NvmlProbe, format_line, parse_line, throttle_names
from keepstep.ports import GpuSample


class Driver:
    """Answers as pynvml's functions do: its constants and errors, and only names that it has."""

    def __init__(self, answers: dict[tuple[str, int], object], events: list[tuple[int, int]] = ()) -> None:
        self._answers = answers
        self._events = list(events)
        self.closed = False

    def __getattr__(self, name: str):
        real = getattr(pynvml, name)
        if not callable(real) or isinstance(real, type):
            return real
        return lambda *args: self._answer(name, *args)

    def _answer(self, name: str, *args):
        if name == "nvmlDeviceGetCount":
            return len({index for _, index in self._answers})
        if name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetIndex"):
            return args[0]
        if name == "nvmlEventSetCreate":
            return object()
        if name == "nvmlEventSetWait_v2":
            if not self._events:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            device, xid = self._events.pop(0)
            return _Event(device, pynvml.nvmlEventTypeXidCriticalError, xid)
        if name in ("nvmlShutdown", "nvmlEventSetFree", "nvmlDeviceRegisterEvents"):
            self.closed = name == "nvmlShutdown"
            return None
        code = self._answers.get((name, args[0]), pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
        if isinstance(code, Exception):
            raise code
        return code


class _Event(NamedTuple):
    device: int
    eventType: int
    eventData: int


def error(code: str) -> Exception:
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))


def test_a_gpu_that_tells_little_is_shown_with_gaps():
    probe = NvmlProbe(Driver({("nvmlDeviceGetUUID", 0): "GPU-a", ("nvmlDeviceGetTemperature", 0): 55}))
    assert probe.poll(0) == [GpuSample("GPU-a", 0, temperature_c=55)]


def test_a_gpu_that_tells_everything():
    memory = pynvml.c_nvmlMemory_t(used=5)
    driver = Driver(
        {
            ("nvmlDeviceGetUUID", 0): b"GPU-a",
            ("nvmlDeviceGetTemperature", 0): 55,
            ("nvmlDeviceGetPowerUsage", 0): 312_500,
            ("nvmlDeviceGetMemoryInfo", 0): memory,
            ("nvmlDeviceGetTotalEccErrors", 0): 3,
            ("nvmlDeviceGetRemappedRows", 0): (0, 1, 0, 1),
            ("nvmlDeviceGetCurrentClocksThrottleReasons", 0): 0x41,
        }
    )
    probe = NvmlProbe(driver)
    assert probe.poll(0) == [
        GpuSample(
            "GPU-a",
            0,
            temperature_c=55,
            power_w=312.5,
            memory_used_bytes=5,
            ecc_corrected=3,
            ecc_uncorrected=3,
            remap_failed=True,
            throttle=("hw_thermal_slowdown",),
            repair_pending=False,
        )
    ]
    probe.close()
    assert driver.closed


def test_a_lost_gpu_does_not_hide_the_others():
    driver = Driver(
        {
            ("nvmlDeviceGetUUID", 0): "GPU-a",
            ("nvmlDeviceGetTemperature", 0): error("GPU_IS_LOST"),
            ("nvmlDeviceGetUUID", 1): "GPU-b",
            ("nvmlDeviceGetTemperature", 1): 50,
        },
        events=[(0, 79), (1, 63), (0, 74)],
    )
    assert NvmlProbe(driver).poll(0.01) == [
        GpuSample("GPU-a", 0, lost=True, xids=(79, 74)),
        GpuSample("GPU-b", 1, temperature_c=50, xids=(63,)),
    ]


def test_xids_are_told_once():
    driver = Driver({("nvmlDeviceGetTemperature", 0): 50}, events=[(0, 31)])
    probe = NvmlProbe(driver)
    assert [sample.xids for sample in probe.poll(0.01) + probe.poll(0.01)] == [(31,), ()]


@pytest.mark.parametrize(
    ("bits", "names"),
    [(0, ()), (0x1, ()), (0x2, ()), (0x4, ("sw_power_cap",)), (0x28, ("hw_slowdown", "sw_thermal_slowdown"))],
)
def test_throttle_names(bits, names):
    assert throttle_names(bits) == names


def test_throttle_reasons_are_nvml_s():
    known = {
        bits
        for name, bits in vars(pynvml).items()
        if name.startswith("nvmlClocksThrottleReason") and isinstance(bits, int)
    }
    assert set(nvml.THROTTLE_REASONS) <= known


@pytest.mark.parametrize(
    "samples",
    [[], [GpuSample("GPU-a", 0)], [GpuSample("GPU-a", 0, throttle=("hw_slowdown",), xids=(79, 63), power_w=1.5)]],
)
def test_a_line_is_read_as_it_was_written(samples):
    line = format_line(samples)
    assert "\n" not in line
    assert parse_line(line) == samples


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"gpus":[{}]}', '{"gpus":[{"uuid":"a","xids":[],"extra":1}]}'])
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError):
        parse_line(line)


def test_no_gpu_is_normal(capsys):
    """On a host without a driver the probe says so and ends; on one with GPUs it lists them."""
    probe = nvml.open_probe()
    count = 0 if probe is None else probe.count
    if probe is not None:
        probe.close()
    assert nvml.main(["--once"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) == count


class _Memory(NamedTuple):
    used: int


class _Holder(NamedTuple):
    pid: int
    usedGpuMemory: int | None


class OldDriver(Driver):
    """Knows memory in use only together with what the driver keeps."""

    def _answer(self, name: str, *args):
        if name == "nvmlDeviceGetMemoryInfo" and len(args) > 1:
            raise error("FUNCTION_NOT_FOUND")
        return super()._answer(name, *args)


def test_memory_is_asked_of_old_drivers_too():
    driver = OldDriver({("nvmlDeviceGetMemoryInfo", 0): _Memory(900)})
    assert [sample.memory_used_bytes for sample in NvmlProbe(driver).poll(0)] == [900]


def test_memory_is_waited_for_until_it_is_free():
    answers: dict[tuple[str, int], object] = {("nvmlDeviceGetMemoryInfo", gpu): _Memory(900) for gpu in (0, 1)}
    driver = Driver(answers | {("nvmlDeviceGetMemoryInfo", 2): error("GPU_IS_LOST")})
    told = nvml.until_free(NvmlProbe(driver), {"index-0": 500, "index-2": 0}, 3600.0)
    assert next(told) == {"index-0": 400}  # nobody said anything of the second one, and the third can not say it
    driver._answers["nvmlDeviceGetMemoryInfo", 0] = _Memory(500)
    assert list(told) == [{}]


def test_memory_that_stays_held_is_told_once_the_time_is_over():
    probe = NvmlProbe(Driver({("nvmlDeviceGetMemoryInfo", 0): _Memory(900)}))
    assert list(nvml.until_free(probe, {"index-0": 500}, 0.0)) == [{"index-0": 400}]


def test_memory_that_is_free_is_not_waited_for():
    probe = NvmlProbe(Driver({("nvmlDeviceGetMemoryInfo", 0): _Memory(500)}))
    assert list(nvml.until_free(probe, {"index-0": 500}, 3600.0)) == [{}]


def test_what_the_job_s_living_processes_hold_is_not_waited_for():
    """A standby whose imports have opened the driver holds some, and goes on to."""
    holders = [_Holder(os.getpid(), 300), _Holder(1, 100), _Holder(1 << 22, 50), _Holder(os.getpid(), None)]
    answers = {("nvmlDeviceGetMemoryInfo", 0): _Memory(900), ("nvmlDeviceGetComputeRunningProcesses", 0): holders}
    probe = NvmlProbe(Driver(answers), family=os.getpid())
    assert next(nvml.until_free(probe, {"index-0": 500}, 3600.0)) == {"index-0": 100}
    assert list(nvml.until_free(probe, {"index-0": 600}, 3600.0)) == [{}]
    assert [sample.foreign_bytes for sample in probe.poll(0)] == [100]


def test_each_look_is_told_so_that_a_driver_that_hangs_is_noticed():
    probe = NvmlProbe(Driver({("nvmlDeviceGetMemoryInfo", 0): _Memory(900)}))
    told = nvml.until_free(probe, {"index-0": 500}, 3600.0)
    assert [next(told) for _ in range(3)] == [{"index-0": 400}] * 3
