"""The GPU probe: NVML's answers as one line of JSON per poll.

`python -m keepstep.adapters.nvml` runs it in a process of its own, since a call into a sick driver may never return:
the agent reads lines and, where they stop coming, kills the probe. A host without a GPU or driver is normal: one line
with an empty list, and exit 0. With `--free` it waits until the driver has taken back the memory of one that ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from keepstep import kernel
from keepstep.adapters.clock import monotonic
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

# NVML's numbers for what it wants done to a device, from driver 570 on.
RECOVERY_ACTIONS = {
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}

_LINK_TOTALS = ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY", "ECC_DATA")
_OF_A_LINK = ("RCV_ERRORS", "LOCAL_LINK_INTEGRITY_ERRORS", "LINK_RECOVERY_EVENTS")
"""Hopper and later count these, by link, and of the totals only some."""

_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_XIDS_MAX = 64
"""So many belong to one poll: a GPU that reports them without end is asked all the same."""

_POLL_MIN_S, _FREE_POLL_S = 0.2, 0.02

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


class _LostDevice(Exception):
    """The driver does not reach a device any more."""


class NvmlProbe:
    """This host's GPUs through NVML; use `open_probe`."""

    def __init__(self, nvml: ModuleType, family: int | None = None) -> None:
        """Args: family: the process whose descendants are this job's; this one's parent if not said otherwise."""
        self._nvml, self._family = nvml, os.getppid() if family is None else family
        self._reset_wanted = False
        self._uuids: dict[int, str] = {}
        self._handles = [self._handle(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._events = nvml.nvmlEventSetCreate()
        self._listening = False
        for index, handle in enumerate(self._handles):
            self._uuids[index] = self._uuid(index, handle)
            try:
                if handle is not None:
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

    def held(self) -> dict[str, int]:
        """Bytes of memory in use, by GPU, of those that can say so, without what the family's processes hold."""
        found = {}
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(_LostDevice):
                used = None if handle is None else self._used(handle)
                if used is not None:
                    ours, _ = self._shares(handle) or (0, 0)
                    found[self._uuids[index]] = used - ours
        return found

    def close(self) -> None:
        nvml = self._nvml
        nvml.nvmlEventSetFree(self._events)
        nvml.nvmlShutdown()

    def _handle(self, index: int) -> Any:
        """What a device is asked by; None for one that the driver counts and does not reach.

        Raises:
            NVMLError: this host may not ask it.
        """
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                raise
            return None

    def _uuid(self, index: int, handle: Any) -> str:
        try:
            uuid = None if handle is None else self._ask(self._nvml.nvmlDeviceGetUUID, handle)
        except _LostDevice:
            uuid = None
        return uuid.decode() if isinstance(uuid, bytes) else uuid or f"index-{index}"

    def _wait_for_xids(self, wait_s: float) -> dict[int, tuple[int, ...]]:
        nvml = self._nvml
        found: dict[int, tuple[int, ...]] = {}
        if not self._listening:
            threading.Event().wait(wait_s)
            return found
        timeout_ms = round(wait_s * 1000)
        for _ in range(_XIDS_MAX):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
            except nvml.NVMLError as error:
                # A timeout is the usual end; anything else is left to the questions that follow to find out.
                if timeout_ms and error.value != nvml.NVML_ERROR_TIMEOUT:
                    threading.Event().wait(wait_s)
                return found
            index = self._index_of(event.device)
            if event.eventType == nvml.nvmlEventTypeXidCriticalError and index is not None:
                found[index] = (*found.get(index, ()), int(event.eventData))
            timeout_ms = 0  # what else has come already belongs to the same poll
        return found

    def _index_of(self, device: Any) -> int | None:
        """Which GPU an event is of; one that is lost may not say so any more, but has the same handle."""
        try:
            index = self._ask(self._nvml.nvmlDeviceGetIndex, device)
        except _LostDevice:
            index = None
        if index is not None:
            return int(index)
        return next((place for place, known in enumerate(self._handles) if _address(known) == _address(device)), None)

    def _sample(self, index: int, handle: Any, xids: tuple[int, ...]) -> GpuSample:
        self._reset_wanted = False
        if handle is not None:
            try:
                return self._look(index, handle, xids)
            except _LostDevice:
                pass
        return GpuSample(self._uuids[index], index, lost=True, xids=xids)

    def _look(self, index: int, handle: Any, xids: tuple[int, ...]) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        temperature_c = ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        memory_used_bytes, shares = self._used(handle), self._shares(handle)
        remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)
        pending = ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        held_down = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if held_down is None:  # drivers before 535 know it by its old name
            held_down = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        down, link_errors = self._links(handle)
        waits = [bool(each) for each in (None if remapped is None else remapped[2], pending) if each is not None]
        return GpuSample(
            self._uuids[index],
            index,
            temperature_c=None if temperature_c is None else float(temperature_c),
            power_w=None if power_mw is None else power_mw / 1000,
            memory_used_bytes=memory_used_bytes,
            ecc_corrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, corrected, nvml.NVML_VOLATILE_ECC),
            ecc_uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_VOLATILE_ECC),
            remap_failed=None if remapped is None else bool(remapped[3]),
            throttle=throttle_names(held_down or 0),
            xids=xids,
            repair_pending=any(waits) if waits else None,
            retired_pages=self._retired(handle),
            clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_max_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            links_down=down,
            link_errors=link_errors,
            pcie_replays=ask(nvml.nvmlDeviceGetPcieReplayCounter, handle),
            foreign_bytes=None if shares is None else shares[1],
            recovery=self._recovery(handle),
        )

    def _recovery(self, handle: Any) -> str:
        """What the driver wants done; empty for nothing, and where it is too old to say so (570 is not)."""
        wanted = self._fields(handle, [(self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)])[0]
        if not wanted:
            return "gpu_reset" if self._reset_wanted else ""
        return RECOVERY_ACTIONS.get(wanted, f"action_{wanted}")

    def _retired(self, handle: Any) -> int | None:
        nvml = self._nvml
        causes = (
            nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        )
        pages = [self._ask(nvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in causes]
        return None if None in pages else sum(len(each or ()) for each in pages)

    def _links(self, handle: Any) -> tuple[int | None, int | None]:
        """How many NVLinks are not active, and the errors of all of them; None and None where there are none."""
        nvml, active, links = self._nvml, 0, 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:
                break
            links, active = links + 1, active + int(bool(state))
        if not links:
            return None, None
        totals = [(getattr(nvml, f"NVML_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL"), 0) for name in _LINK_TOTALS]
        each = [
            (getattr(nvml, f"NVML_FI_DEV_NVLINK_COUNT_{name}"), link) for name in _OF_A_LINK for link in range(links)
        ]
        counts = [count for count in self._fields(handle, [*totals, *each]) if count is not None]
        return links - active, sum(counts) if counts else None

    def _used(self, handle: Any) -> int | None:
        """Memory in use, without what the driver keeps for itself; drivers before 510 know only both together."""
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        if memory is None:
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return None if memory is None else int(memory.used)

    def _shares(self, handle: Any) -> tuple[int, int] | None:
        """Memory that this job's processes hold, and that others do, of those that this process can see."""
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if not found:
            return None if found is None else (0, 0)
        table = kernel.processes()
        family = kernel.family(table, [self._family])
        ours = sum(each.usedGpuMemory or 0 for each in found if each.pid in family)
        return ours, sum(each.usedGpuMemory or 0 for each in found if each.pid in table and each.pid not in family)

    def _fields(self, handle: Any, wanted: list[tuple[int, int]]) -> list[int | None]:
        """The values of fields, each by its number and what it is of; None for each that there is none of."""
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, wanted)
        if values is None:
            return [None] * len(wanted)
        lost = self._nvml.NVML_ERROR_GPU_IS_LOST
        if any(value.nvmlReturn == lost for value in values):
            raise _LostDevice
        return [None if value.nvmlReturn else _number(value) for value in values]

    def _ask(self, question: Callable[..., _Answer], *args: Any) -> _Answer | None:
        """Return the answer, or None where this device or driver has none.

        Raises:
            _LostDevice: the driver does not reach the device.
        """
        try:
            return question(*args)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise _LostDevice from error
            self._reset_wanted = self._reset_wanted or error.value == self._nvml.NVML_ERROR_RESET_REQUIRED
            return None


def _number(value: Any) -> int:
    """A field's value: which member of the union holds it, its type says."""
    return int(getattr(value.value, _VALUE_MEMBERS[value.valueType]))


def _address(handle: Any) -> object:
    """What two handles of one device have in common."""
    return ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, ctypes._Pointer) else handle


def open_probe(family: int | None = None) -> NvmlProbe | None:
    """Return a probe, or None where this host has no GPU or no driver; see `NvmlProbe` for `family`."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        probe = NvmlProbe(pynvml, family)
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
        threading.Event().wait(_POLL_MIN_S)
        wait_s = every_s - _POLL_MIN_S


def until_free(probe: NvmlProbe, free: Mapping[str, int], limit_s: float) -> Iterator[dict[str, int]]:
    """Wait until no GPU has more bytes in use than `free` says, for `limit_s` seconds at most.

    What the family's processes hold stays out of it: of a worker that is gone, none of them is left.

    Yields what is held beyond that, by GPU, at each look: who reads it sees whether the driver still answers.
    """
    give_up = monotonic() + limit_s
    while True:
        over = {uuid: used - free[uuid] for uuid, used in probe.held().items() if used > free.get(uuid, used)}
        yield over
        if not over or monotonic() >= give_up:
            return
        threading.Event().wait(_FREE_POLL_S)


def main(argv: list[str]) -> int:
    """Print polls until the reader or the parent is gone."""
    parser = argparse.ArgumentParser(prog="keepstep.adapters.nvml", description="Print the GPUs' state as JSON lines.")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="time between two polls")
    parser.add_argument("--once", action="store_true", help="print one line and exit")
    parser.add_argument("--family", type=int, metavar="PID", help="the process whose descendants are the job's own")
    parser.add_argument("--free", type=json.loads, metavar="JSON", help="wait until others hold no more of each GPU")
    parser.add_argument("--limit", type=float, default=10.0, metavar="SECONDS", help="wait so long at most")
    options = parser.parse_args(argv)
    probe = open_probe(options.family)
    if probe is None:
        print(format_line([]) if options.free is None else "{}", flush=True)
        return 0
    try:
        if options.free is not None:
            for over in until_free(probe, options.free, options.limit):
                print(json.dumps(over), flush=True)
            return 0
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
