"""The GPU probe's process: a sick driver hangs its callers, so it is asked by a child that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from keepstep import kernel
from keepstep.adapters.clock import sleep
from keepstep.adapters.nvml import parse_line
from keepstep.core.policy import Policy
from keepstep.ports import GpuSample

_SILENT_POLLS = 6
_AGAIN_S = 30.0
_LAST_WORDS_S = 2.0


class GpuSink(Protocol):
    """Takes samples of all GPUs of this host."""

    def gpus(self, samples: Sequence[GpuSample]) -> None: ...


async def watch_gpus(policy: Policy, sink: GpuSink, log: Callable[[str], None]) -> None:
    """Keep a probe running and pass on what it says; a host without a GPU needs none."""
    every_s = policy.health.gpu.poll
    while True:
        process = await asyncio.create_subprocess_exec(
            *kernel.interpreter(), "-m", "keepstep.adapters.nvml", "--every", str(every_s),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        found = True
        try:
            found = await _listen(process, every_s * _SILENT_POLLS + 10.0, sink)
            async with asyncio.timeout(_LAST_WORDS_S):
                await process.wait()  # killing one that ends by itself would take its status from whoever waits for it
        except TimeoutError:
            log("the GPU probe hangs")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if not found:
            return
        log(f"the GPU probe ended or fell silent; asked again in {_AGAIN_S:.0f} s")
        await sleep(_AGAIN_S)


async def _listen(process: asyncio.subprocess.Process, silence_s: float, sink: GpuSink) -> bool:
    """Pass samples on until the probe ends or says nothing for `silence_s`; False where there is no GPU."""
    found = False
    assert process.stdout is not None
    while True:
        try:
            async with asyncio.timeout(silence_s):
                line = await process.stdout.readline()
        except TimeoutError:
            return True
        if not line:
            return found
        samples = parse_line(line.decode())
        found = found or bool(samples)
        if samples:
            sink.gpus(samples)
