"""A worker that stands still is looked at before anything is done about it: what is it doing, and since when?"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from keepstep import kernel
from keepstep.adapters import stacks
from keepstep.adapters.clock import sleep
from keepstep.adapters.stacks import Thread
from keepstep.adapters.uploader import UploaderGone
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.profiling import Profiling
from keepstep.app.sampling import Sampler
from keepstep.app.storing import Storing
from keepstep.core.actions import CollectStacks, SamplePulse
from keepstep.core.events import Event, PulseSampled, StacksCollected
from keepstep.core.stalls import Activity, Stall
from keepstep.core.values import evolve, frozen
from keepstep_worker.wire import STACKS_SIGNAL, Progress

_LOOK_S = 0.5
"""Over so long it is seen whether a process uses its processor."""
_SPINS = 0.8
"""Processors in use at the least, where something spins."""
_ANSWER_S = 2.0
"""How long a worker may take to answer what it is asked: its interpreter may be held by who does not."""
_LAST_LOOK_S = 2.0
"""How long a worker that is to be killed may live for it."""
_CALLS_MAX, _CALL_CHARACTERS_MAX = 6, 120
_NOT_THE_SCRIPT = ("/site-packages/", "/dist-packages/", "/lib/python", "/keepstep_worker/", "<frozen", "<string>")
_TENSORFLOW = "/tensorflow/python/"


@frozen
class LastLook:
    """The stacks of a worker that is killed."""

    rank: int
    generation: int
    text: str


@frozen
class Found:
    """A rank that was examined: its process, what that does, its threads, and how these were seen."""

    rank: int
    pid: int
    stall: Stall
    threads: tuple[Thread, ...]
    how: str


class Probing:
    """Looks at this host's worker, at each of its ranks, and keeps the stacks that it finds."""

    def __init__(
        self,
        link: WorkerLink,
        sampler: Sampler,
        storing: Storing,
        folder: Path,
        post: Callable[[Event], None],
        log: Callable[[str], None],
    ) -> None:
        """Args: folder: where stacks are kept, of the host that it is named after; in the store as well."""
        self._link, self._sampler, self._storing = link, sampler, storing
        self._folder, self._post, self._log = folder / "stacks", post, log
        self._place = f"stacks/{folder.name}"
        self.profiling = Profiling(link, storing, folder, post, log)
        sampler.on_profiled = self.profiling.on_profiled

    def pulse(self, action: SamplePulse) -> None:
        """Say what the worker is about."""
        self._sampler.sample()
        activity, silent_s = self._sampler.pulse()
        self._post(PulseSampled(action.operation, action.worker_id, activity, silent_s))

    async def collect(self, action: CollectStacks, stacks_file: Path) -> None:
        """Find out what it is doing.

        Args:
            action: which worker.
            stacks_file: where it writes its stacks itself, where that is asked of it.
        """
        ranks = self._ranks(action)
        since = self._sampler.silent_since()
        at = self._first(action)
        first, *others = await asyncio.gather(*[
            self._examine(rank, seen, stacks_file if rank == at else None, since) for rank, seen in ranks.items()
        ])  # fmt: skip
        self._sampler.sample()
        progress = self._link.progress()
        if progress != ranks[at] or not progress.pid:
            self._post(StacksCollected(action.operation, action.worker_id, None))
            return
        told = tuple(evolve(found.stall, rank=found.rank) for found in others)
        own = evolve(first.stall, rank=first.rank) if told else first.stall
        self._post(StacksCollected(action.operation, action.worker_id, own, told))
        # what else there is to know takes longer, and nobody waits for it
        await asyncio.gather(*[self._keep(action, found) for found in (first, *others)])

    def _first(self, action: CollectStacks) -> int:
        return self._link.first_rank if self._link.first_rank >= 0 else action.rank

    def _ranks(self, action: CollectStacks) -> dict[int, Progress]:
        """What this host's ranks have published, the first one's first."""
        others = self._link.progress_of_others()
        return {self._first(action): self._link.progress(), **{r: p for r, p in others.items() if p.pid}}

    async def _examine(self, rank: int, progress: Progress, stacks_file: Path | None, since: float) -> Found:
        """What one rank is doing, and where in its script."""
        before = stacks.look(progress.pid)
        asked = rank if self._link.first_rank >= 0 else -1
        ready, _ = await asyncio.gather(self._link.is_ready(asked, _ANSWER_S), sleep(_LOOK_S))
        after = stacks.look(progress.pid)
        threads, how = await self._stacks(progress.pid, asked, stacks_file)
        in_step, calls = read_threads(threads)
        activity = self._sampler.activity_of(progress)
        stall = Stall(
            activity,
            round(since, 3),
            progress.entered_step,
            progress.completed_step,
            after.state,
            in_step,
            after.cpu_s - before.cpu_s >= _SPINS * _LOOK_S,
            calls,
            activity is not Activity.START,
            ready if progress.entered_step > progress.completed_step else None,
        )
        return Found(rank, progress.pid, stall, threads, how)

    async def look_last(self, worker_id: str) -> LastLook | None:
        """The Python stacks of a worker that a signal has stopped, and that is about to be killed; None of others."""
        progress = self._link.progress()
        rank = self._sampler.rank_of(worker_id)
        if rank is None or not progress.pid or not kernel.is_frozen(progress.pid):
            return None
        try:
            async with asyncio.timeout(_LAST_LOOK_S):
                threads = await stacks.python_stacks(progress.pid)
        except (OSError, TimeoutError) as error:
            self._log(f"rank {rank} was stopped by a signal; its stacks can not be had: {error}")
            return None
        head = f"Python stacks of process {progress.pid}, stopped by a signal, read by py-spy"
        return LastLook(rank, progress.generation, f"{head}\n\n{stacks.show(threads)}\n")

    async def keep(self, look: LastLook) -> None:
        """Keep what was seen; nobody waits for it."""
        await self._write(look.rank, look.generation, look.text, "was stopped by a signal")

    async def _stacks(self, pid: int, asked: int, file: Path | None) -> tuple[tuple[Thread, ...], str]:
        """Python stacks by whatever way there is, and which it was; `file`: where it writes them itself, if it does."""
        if not pid:
            return (), "can not be had: which process it is has not been said"
        try:
            return await stacks.python_stacks(pid), "read by py-spy"
        except OSError as error:
            wrong = str(error)
        if file is None:
            return (), f"can not be had: {wrong}"
        try:
            threads = await stacks.ask_for_stacks(
                pid, STACKS_SIGNAL, file, lambda: self._link.has_written_stacks(asked, _ANSWER_S)
            )
            return threads, f"written by the process ({wrong})"
        except OSError as error:
            return (), f"can not be had: {wrong}; {error}"

    async def _keep(self, action: CollectStacks, found: Found) -> None:
        pid = found.pid
        if not found.threads and not kernel.is_alive(pid):  # by whatever else: TensorFlow ends who waits for too long
            self._log(f"rank {found.rank} stood still, and ended before its stacks were read")
            return
        parts = [f"Python stacks of process {pid}, {found.how}", stacks.show(found.threads)]
        try:
            parts += ["native stacks", await stacks.native_stacks(pid, action.pause_s)]
        except OSError as error:
            parts.append(f"native stacks can not be had: {error}")
        parts += ["threads in the kernel: id, state, name, what it waits for", stacks.kernel_side(pid)]
        await self._write(found.rank, action.generation, "\n\n".join(parts) + "\n", "stands still")

    async def _write(self, rank: int, generation: int, text: str, why: str) -> None:
        name = f"generation-{generation}-rank-{rank}.txt"
        try:
            await asyncio.to_thread(write_stacks, self._folder / name, text)
            self._log(f"rank {rank} {why}; its stacks are in {self._folder / name}")
        except OSError as error:
            self._log(f"stacks of rank {rank} can not be kept: {error}")
            return
        with contextlib.suppress(UploaderGone):  # where there is no store they are kept here alone
            place = f"{self._place}/{name}"
            await self._storing.ask({"command": "note", "place": place, "file": str(self._folder / name)})


def read_threads(threads: Sequence[Thread]) -> tuple[bool, tuple[str, ...]]:
    """Whether the main thread is inside TensorFlow, and the innermost call of the script in each thread."""
    in_step, calls = False, []
    for thread in sorted(threads, key=lambda each: not each.is_main):
        if thread.is_main and thread.frames:
            in_step = _TENSORFLOW in thread.frames[0].file
        of_script = (f for f in thread.frames if not any(part in f.file for part in _NOT_THE_SCRIPT))
        frame = next(of_script, None)
        if frame is not None:
            calls.append(f"{os.path.basename(frame.file)}:{frame.line} {frame.function}"[:_CALL_CHARACTERS_MAX])
    return in_step, tuple(dict.fromkeys(calls))[:_CALLS_MAX]


def write_stacks(path: Path, text: str) -> None:
    """Write them where nothing half is ever seen.

    Raises:
        OSError: they can not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".part")
    begun.write_text(text, encoding="utf-8")
    begun.replace(path)
