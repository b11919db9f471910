"""GPU memory between two workers: the next one starts once the driver has taken back what the last one held.

A driver may need a while for it after the process is gone, and TensorFlow takes all the memory that it finds: a worker
that comes too early would find too little, and fail. An agent that was started again knows nothing of the last worker,
and lets its first one start at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable

from keepstep import kernel
from keepstep.ports import GpuSample

LIMIT_S = 10.0
"""A worker starts after that all the same: what is held may not be ours, or its owner never goes."""

_FIRST_S, _SILENT_S = 8.0, 3.0
"""A driver that says nothing for so long hangs: until its first answer, and between two."""
_LAST_WORDS_S = 2.0
_SLACK_BYTES = 256 << 20
"""What comes and goes with the driver's own doings."""


class GpuMemory:
    """This host's GPUs: what they held when they held least, and whether that is so again."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._least: dict[str, int] = {}
        self._is_silent = False
        self._wait: asyncio.Task[None] | None = None
        self._ends: list[asyncio.Task[None]] = []

    def saw(self, samples: Iterable[GpuSample]) -> None:
        """Take in what the probe has found."""
        self._is_silent = False
        for sample in samples:
            used = sample.memory_used_bytes
            if used is not None:
                self._least[sample.uuid] = min(used, self._least.get(sample.uuid, used))

    def fell_silent(self) -> None:
        """The driver does not answer: until it does nobody waits for what it says."""
        self._is_silent = True

    def worker_ended(self) -> None:
        """A worker is gone; begin to wait for its memory, where there are GPUs."""
        if self._least and not self._is_silent and self.freeing is None:
            self._wait = asyncio.create_task(self._until_free())

    @property
    def freeing(self) -> asyncio.Task[None] | None:
        """What a worker has to wait for before it starts; None where there is nothing."""
        return None if self._wait is None or self._wait.done() else self._wait

    async def close(self) -> None:
        """Wait for nothing any more."""
        if self._wait is not None:
            self._wait.cancel()
            await asyncio.wait([self._wait])
        if self._ends:
            await asyncio.wait(self._ends)

    async def _until_free(self) -> None:
        try:
            over = await self._ask({uuid: used + _SLACK_BYTES for uuid, used in self._least.items()})
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            self._log(f"the GPUs' memory is not waited for: {str(error) or 'the driver gives no answer'}")
            return
        for uuid, size in over.items():  # it stays so: nobody waits for it again
            self._least[uuid] = self._least.get(uuid, 0) + _SLACK_BYTES + size

    async def _ask(self, free: dict[str, int]) -> dict[str, int]:
        """What is held in the end, by GPU, beyond what was to be free; by a child, as the driver may not answer."""
        process = await asyncio.create_subprocess_exec(
            *kernel.interpreter(), "-m", "keepstep.adapters.nvml", "--free", json.dumps(free), "--limit", str(LIMIT_S),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            return await self._listen(process.stdout)
        finally:
            ends = asyncio.create_task(end(process))  # one that hangs in its driver is not waited for
            self._ends = [*(task for task in self._ends if not task.done()), ends]

    async def _listen(self, lines: asyncio.StreamReader) -> dict[str, int]:
        over: dict[str, int] = {}
        told, patience_s = False, _FIRST_S
        while line := await asyncio.wait_for(lines.readline(), patience_s):
            patience_s = _SILENT_S
            over = json.loads(line)
            if over and not told:
                told = True
                self._log(f"the next worker waits for the GPUs' memory: {_text(over)} still held")
        if over:
            self._log(f"the next worker does not wait any longer: {_text(over)} held after {LIMIT_S:.0f} s")
        return over


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a child that asks a driver and still runs; it is waited for as long as one takes that can die."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await process.wait()


def _text(over: dict[str, int]) -> str:
    return ", ".join(f"{size / (1 << 30):.1f} GiB of {uuid}" for uuid, size in sorted(over.items()))
