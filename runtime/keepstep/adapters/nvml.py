"""The GPU probe: NVML's answers as one line of JSON per poll.

`python -m keepstep.adapters.nvml` runs it in a process of its own, since a call into a sick driver may never return:
the agent reads lines and, where they stop coming, kills the probe. A host without a GPU or driver is normal: one line
with an empty list, and exit 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from keepstep.ports import GpuSample

# NVML's bits for what holds the clocks down. Idle, and clocks that somebody set on purpose, are no throttling.
THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}

_Answer = TypeVar("_Answer")


def format_line(samples: list[GpuSample]) -> str:
    """Return one poll as one line of JSON."""
    return json.dumps({"gpus": [dataclasses.asdict(sample) for sample in samples]}, separators=(",", ":"))


def parse_line(line: str) -> list[GpuSample]:
    """Return the samples of a line.

    Raises:
        ValueError: the line is not one that this probe writes.
    """
    try:
        gpus = json.loads(line)["gpus"]
        return [GpuSample(**{**gpu, "throttle": tuple(gpu["throttle"]), "xids": tuple(gpu["xids"])}) for gpu in gpus]
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a line of the GPU probe ({error}): {line[:80]!r}") from error


def throttle_names(bits: int) -> tuple[str, ...]:
    """Return why the clocks are held down, in the order of NVML's bits."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


class NvmlProbe:
    """This host's GPUs through NVML; use `open_probe`."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._uuids: dict[int, str] = {}
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._events = nvml.nvmlEventSetCreate()
        self._listening = False
        for index, handle in enumerate(self._handles):
            uuid = self._ask(nvml.nvmlDeviceGetUUID, handle)
            self._uuids[index] = uuid.decode() if isinstance(uuid, bytes) else uuid or f"index-{index}"
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._listening = True
            except nvml.NVMLError:
                continue  # some virtual GPUs have no events: they are polled all the same

    @property
    def count(self) -> int:
        """The number of GPUs found at the start."""
        return len(self._handles)

    def poll(self, wait_s: float) -> list[GpuSample]:
        """Wait for Xid errors for `wait_s` seconds at most, at least until the first one; then ask every GPU."""
        xids = self._wait_for_xids(wait_s)
        return [self._sample(index, handle, xids.get(index, ())) for index, handle in enumerate(self._handles)]

    def close(self) -> None:
        nvml = self._nvml
        nvml.nvmlEventSetFree(self._events)
        nvml.nvmlShutdown()

    def _wait_for_xids(self, wait_s: float) -> dict[int, tuple[int, ...]]:
        nvml = self._nvml
        found: dict[int, tuple[int, ...]] = {}
        if not self._listening:
            threading.Event().wait(wait_s)
            return found
        timeout_ms = round(wait_s * 1000)
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
            except nvml.NVMLError as error:
                # A timeout is the usual end; anything else is left to the questions that follow to find out.
                if timeout_ms and error.value != nvml.NVML_ERROR_TIMEOUT:
                    threading.Event().wait(wait_s)
                return found
            index = self._ask(nvml.nvmlDeviceGetIndex, event.device)
            if event.eventType == nvml.nvmlEventTypeXidCriticalError and index is not None:
                found[index] = (*found.get(index, ()), int(event.eventData))
            timeout_ms = 0  # what else has come already belongs to the same poll

    def _sample(self, index: int, handle: Any, xids: tuple[int, ...]) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        try:
            temperature_c = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return GpuSample(self._uuids[index], index, lost=True, xids=xids)
            temperature_c = None
        power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)
        volatile = nvml.NVML_VOLATILE_ECC
        return GpuSample(
            self._uuids[index],
            index,
            temperature_c=temperature_c,
            power_w=None if power_mw is None else power_mw / 1000,
            memory_used_bytes=None if memory is None else int(memory.used),
            ecc_corrected=ask(
                nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
            ),
            ecc_uncorrected=ask(
                nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
            ),
            remap_failed=None if remapped is None else bool(remapped[3]),
            throttle=throttle_names(ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
            xids=xids,
        )

    def _ask(self, question: Callable[..., _Answer], *args: Any) -> _Answer | None:
        """Return the answer, or None where this device or driver has none."""
        try:
            return question(*args)
        except self._nvml.NVMLError:
            return None


def open_probe() -> NvmlProbe | None:
    """Return a probe, or None where this host has no GPU or no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        probe = NvmlProbe(pynvml)
    except pynvml.NVMLError:
        probe = None
    if probe is None or not probe.count:
        pynvml.nvmlShutdown()
        return None
    return probe


def polls(probe: NvmlProbe, every_s: float) -> Iterator[list[GpuSample]]:
    """Poll at once and then every `every_s` seconds, at once again where an Xid comes, until the parent is gone."""
    parent = os.getppid()
    wait_s = 0.0
    while os.getppid() == parent:
        yield probe.poll(wait_s)
        wait_s = every_s


def main(argv: list[str]) -> int:
    """Print polls until the reader or the parent is gone."""
    parser = argparse.ArgumentParser(prog="keepstep.adapters.nvml", description="Print the GPUs' state as JSON lines.")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="time between two polls")
    parser.add_argument("--once", action="store_true", help="print one line and exit")
    options = parser.parse_args(argv)
    probe = open_probe()
    if probe is None:
        print(format_line([]), flush=True)
        return 0
    try:
        for samples in polls(probe, options.every):
            print(format_line(samples), flush=True)
            if options.once:
                break
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush to
    finally:
        probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
