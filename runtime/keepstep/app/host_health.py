"""What strains this host: looked for every few seconds, shown, and told to the fold when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from keepstep.adapters.clock import sleep
from keepstep.adapters.host import Disks, HostReader
from keepstep.core.events import Event, StrainsChanged
from keepstep.core.host_sample import StrainKind, Told
from keepstep.core.strains import WINDOW_S, find_strains, settle
from keepstep.ports import HostSample

EVERY_S = 5.0
_LATE_S = 30.0
_LAST_WORDS_S = 1.0
_SHARED_MEMORY = "/dev/shm"
"""What data loaders and collectives share; 64 MB in a container unless it is told otherwise."""

_FILLS = "what writes there will fail: make room, or give the job a larger volume"
_HINTS = {
    StrainKind.MEMORY_SHORT: "the kernel will kill somebody: smaller batches and buffers, or a larger host",
    StrainKind.DISK_SHORT: _FILLS,
    StrainKind.DISK_FILES: _FILLS,
    StrainKind.DISK_READ_ONLY: "what writes there fails: the kernel's log says why",
    StrainKind.DISK_SILENT: "what reads or writes there hangs",
}
"""What is told apart from the rest, once: a job that runs out of these fails."""


class HostSink(Protocol):
    """Takes samples of this host, with what it is strained by."""

    def host(self, sample: HostSample, strained: Collection[StrainKind]) -> None: ...


class HostWatch:
    """One host's sensor."""

    def __init__(
        self,
        read: Callable[[], HostSample],
        sink: HostSink,
        post: Callable[[Event], None],
        log: Callable[[str], None],
        every_s: float = EVERY_S,
    ) -> None:
        """Args: read: called in a thread, since a driver that is asked for its counters may take its time."""
        self._read, self._sink, self._post, self._log, self._every_s = read, sink, post, log, every_s
        self._samples: deque[HostSample] = deque(maxlen=1 + round(WINDOW_S / EVERY_S))
        self._told: tuple[Told, ...] = ()
        self._posted: tuple[str, ...] = ()
        self._warned: set[tuple[StrainKind, str]] = set()

    async def run(self) -> None:
        """Look again and again. Ends where the host can not be read at all, which standard error says more of."""
        while True:
            await sleep(self._every_s)  # first of all: what restarts a training has better use for these moments
            sample = await self._look()
            if sample is None:
                self._log("this host can not be read: nothing will be told of what strains it")
                return
            self.absorb(sample)

    def absorb(self, sample: HostSample) -> None:
        """Compare a sample with that of a while ago; before there is one, see only what the host is short of."""
        self._samples.append(sample)
        before = self._samples[0] if len(self._samples) == self._samples.maxlen else sample
        self._told = settle(self._told, find_strains(before, sample), sample.at)
        self._sink.host(sample, {each.strain.kind for each in self._told})
        self._warn()
        texts = tuple(each.strain.text for each in self._told)
        if texts != self._posted:
            self._posted = texts
            self._post(StrainsChanged("host", texts))

    def _warn(self) -> None:
        for strain in (each.strain for each in self._told):
            key = strain.kind, strain.what
            if strain.kind in _HINTS and key not in self._warned:
                self._warned.add(key)
                self._log(f"{strain.text}: {_HINTS[strain.kind]}")

    async def _look(self) -> HostSample | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[HostSample | None] = loop.create_future()

        def tell(sample: HostSample | None) -> None:
            if not answer.done():
                answer.set_result(sample)

        def read() -> None:
            sample = None
            try:
                sample = self._read()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is over
                    loop.call_soon_threadsafe(tell, sample)

        # no pool: its threads are waited for at the end, and one that hangs would hold up the exit
        thread = threading.Thread(target=read, name="host", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(_LATE_S):
                sample = await asyncio.shield(answer)
        except TimeoutError:
            self._log(f"this host has not said for {_LATE_S:.0f} s how it is: a driver hangs")
            sample = await answer
        if sample is None:
            thread.join(_LAST_WORDS_S)
        return sample


def watch_host(
    folders: Collection[str], sink: HostSink, post: Callable[[Event], None], log: Callable[[str], None]
) -> HostWatch:
    """The sensor of this host.

    Args:
        folders: what the job writes to, beside what every job does.
    """
    wanted = [tempfile.gettempdir(), *(os.path.abspath(folder) for folder in folders if folder), _SHARED_MEMORY]
    return HostWatch(HostReader(Disks(wanted)).read, sink, post, log)
