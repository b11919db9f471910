"""The GPU probe's process: a sick driver hangs its callers, so it is asked by a child that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from keepstep import kernel
from keepstep.adapters.clock import monotonic, sleep
from keepstep.adapters.nvml import parse_line
from keepstep.app.gpu_memory import GpuMemory, end
from keepstep.core.events import Event, GpusSampled
from keepstep.core.health_knobs import Gpu
from keepstep.core.policy import Policy
from keepstep.ports import GpuSample

_SILENT_POLLS = 3
_PATIENCE_S = 5.0
_FIRST_S = 60.0
"""A driver that nobody has used yet takes seconds for each GPU."""

_AGAIN_S = 10.0
_LAST_WORDS_S = 2.0
_CALM_S = 60.0
"""What comes and goes, or counts on and on, is told once in so long."""

_FOREIGN_BYTES = 256 << 20
_UNNAMED = "index-"


class GpuSink(Protocol):
    """Takes samples of all GPUs of this host."""

    def gpus(self, samples: Sequence[GpuSample]) -> None: ...


class Telling:
    """What of the samples is news: the core is told where something has changed or is wrong, the metrics of all."""

    def __init__(self, knobs: Gpu, now: Callable[[], float]) -> None:
        self._limit, self._now = knobs.temperature_max, now
        self._told: dict[str, GpuSample] = {}
        self._counted_at: dict[str, float] = {}
        self._slowed: dict[tuple[str, str], float] = {}

    def news(self, samples: Iterable[GpuSample]) -> tuple[GpuSample, ...]:
        """Those of the samples that the core is to hear of."""
        found = []
        for sample in samples:
            for reason in sample.throttle:
                self._slowed[sample.uuid, reason] = self._now()
            if self._is_news(sample):
                self._told[sample.uuid] = sample
                found.append(sample)
        return tuple(found)

    def _is_news(self, sample: GpuSample) -> bool:
        told = self._told.get(sample.uuid)
        if told is None or sample.xids or _facts(told) != _facts(sample):
            return True
        if self._is_hot(sample) or self._is_hot(told) or self._slower(sample, told):
            return True
        counted_at = self._counted_at.get(sample.uuid)
        if _counts(told) != _counts(sample) and (counted_at is None or self._now() >= counted_at + _CALM_S):
            self._counted_at[sample.uuid] = self._now()
            return True
        return False

    def _is_hot(self, sample: GpuSample) -> bool:
        return sample.temperature_c is not None and sample.temperature_c > self._limit

    def _slower(self, sample: GpuSample, told: GpuSample) -> bool:
        """Whether something holds the clocks down that did not, or has not for a while."""
        since = self._now() - _CALM_S
        over = [reason for reason in told.throttle if self._slowed.get((sample.uuid, reason), since) <= since]
        return bool(over) or bool(set(sample.throttle) - set(told.throttle) - {"sw_power_cap"})


def _facts(sample: GpuSample) -> tuple[object, ...]:
    """What is told at once where it changes."""
    lasting = sample.lost, sample.recovery, sample.remap_failed, sample.repair_pending, sample.links_down
    return (*lasting, sample.ecc_uncorrected)


def _counts(sample: GpuSample) -> tuple[object, ...]:
    """What is told now and then."""
    counters = sample.ecc_corrected, sample.link_errors, sample.pcie_replays, sample.retired_pages
    return (*counters, (sample.foreign_bytes or 0) // _FOREIGN_BYTES)


class GpuWatch:
    """One host's probe, started again for as long as there are GPUs."""

    def __init__(
        self,
        policy: Policy,
        sink: GpuSink,
        memory: GpuMemory,
        post: Callable[[Event], None],
        log: Callable[[str], None],
    ) -> None:
        self._every_s, self._sink, self._post, self._log = policy.health.gpu.poll, sink, post, log
        self._memory = memory
        self._telling = Telling(policy.health.gpu, monotonic)
        self._names: dict[int, str] = {}
        self._silent = False

    async def run(self) -> None:
        """Keep a probe running and pass on what it says; a host without a GPU needs none, and this ends."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *kernel.interpreter(), "-m", "keepstep.adapters.nvml", "--every", str(self._every_s),
                "--family", str(os.getppid()),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                found = await self._listen(process)
            finally:
                await end(process)
            await process.wait()  # what sits in a call of the driver may outlast SIGKILL: so would the next one
            if not found:
                return
            self._log(f"the GPU probe ended or fell silent; asked again in {_AGAIN_S:.0f} s")
            await sleep(_AGAIN_S)

    async def _listen(self, process: asyncio.subprocess.Process) -> bool:
        """Pass samples on until the probe ends or says nothing for too long; False where there is no GPU."""
        assert process.stdout is not None
        patience_s = max(_FIRST_S, self._every_s)
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    line = await process.stdout.readline()
            except TimeoutError:
                self._fall_silent(f"no word for {patience_s:.0f} s")
                return True
            if not line:
                return await self._ended(process)
            samples = [self._named(sample) for sample in parse_line(line.decode())]
            if samples:
                self._tell(samples)
            elif self._names:
                self._fall_silent("it shows no GPU any more")
            patience_s = self._every_s * _SILENT_POLLS + _PATIENCE_S

    async def _ended(self, process: asyncio.subprocess.Process) -> bool:
        """The probe ends by itself where there is no GPU; killing it then would take its status from who waits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await process.wait()
        code = process.returncode
        if code and self._names:
            self._fall_silent(f"its probe ended with {code}")
        return bool(self._names) or code is None or code < 0

    def _named(self, sample: GpuSample) -> GpuSample:
        """A GPU that was lost before a probe could ask it has the name that it told the probe before."""
        if sample.uuid.startswith(_UNNAMED) and sample.lost:
            return replace(sample, uuid=self._names.get(sample.index, sample.uuid))
        self._names[sample.index] = sample.uuid
        return sample

    def _tell(self, samples: Sequence[GpuSample]) -> None:
        self._sink.gpus(samples)
        self._memory.saw(samples)
        for sample in samples:
            for xid in sample.xids:
                self._log(f"{sample.uuid}: Xid {xid}")
        news = self._telling.news(samples)
        if news or self._silent:
            self._silent = False
            self._post(GpusSampled(news))

    def _fall_silent(self, why: str) -> None:
        if not self._silent:
            self._log(f"the GPU driver does not answer: {why}")
            self._silent = True
            self._memory.fell_silent()
            self._sink.gpus(())  # what is not known any more is not shown
            self._post(GpusSampled((), silent=True))
