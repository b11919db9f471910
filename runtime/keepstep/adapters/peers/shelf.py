"""What a host has to give to others: slabs that are sealed and verified, and what has come of one being fetched."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from keepstep.adapters.clock import monotonic
from keepstep.core.values import frozen
from keepstep.ports import Wanted

Seals = Callable[[], Mapping[int, tuple[int, int]]]
"""Step and sequence of each sealed slab, as the control page says now."""


@frozen
class Region:
    """Where a slab's replicated region lies: bytes from the file's beginning."""

    start: int
    size_bytes: int


@frozen
class Offer:
    """A verified slab, or one that is being fetched: its file, what it holds, and the sequence of its seal."""

    slab: int
    fd: int
    step: int
    sequence: int
    digest: str
    region: Region


_COMING = -1
"""Stands for slab and sequence of what has no seal yet."""
_KEPT_S = 30.0
"""How long what was fetched is given away before it is offered like any other, which takes no longer than its seal."""


class Shelf:
    """The slabs that other hosts may have; a slab whose seal is gone, or another one, is not among them."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals
        self._changed = threading.Condition()
        self._offers: dict[int, Offer] = {}
        self._coming: list[Coming] = []

    def put(self, slab: int, fd: int, step: int, digest: str, region: Region) -> bool:
        """Offer a slab; False where it is not sealed with that step. The descriptor stays the caller's."""
        at, sequence = self._seals().get(slab, (_COMING, _COMING))
        if at != step:
            return False
        with self._changed:
            self._forget(slab)
            self._offers[slab] = Offer(slab, os.dup(fd), step, sequence, digest, region)
            for coming in [each for each in self._coming if (each.step, each.digest) == (step, digest)]:
                self._end(coming)
            self._changed.notify_all()
        return True

    def share(self, fd: int, step: int, digest: str) -> Coming:
        """Offer a snapshot while it is being fetched; close it. The descriptor stays the caller's."""
        coming = Coming(self._changed, self._end, os.dup(fd), step, digest)
        with self._changed:
            self._coming.append(coming)
        return coming

    def stands(self, offer: Offer) -> bool:
        """Whether the slab holds what it held when it was offered."""
        return offer.slab == _COMING or self._seals().get(offer.slab) == (offer.step, offer.sequence)

    def prune(self) -> None:
        """Let go of the memory of slabs that were written anew or dropped."""
        with self._changed:
            for offer in list(self._offers.values()):
                if not self.stands(offer):
                    self._forget(offer.slab)
            for coming in [each for each in self._coming if each.until < monotonic()]:
                self._end(coming)

    @contextlib.contextmanager
    def taken(self, wanted: Wanted) -> Iterator[Offer | None]:
        """The offer that is asked for, kept while it is read; waited for as long as `wanted` says."""
        deadline = monotonic() + wanted.wait_s
        with self._changed:
            found = self._find(wanted)
            while found is None and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)
                found = self._find(wanted)
            fd = -1 if found is None else os.dup(found.fd)
        if found is None:
            yield None
            return
        try:
            yield Offer(found.slab, fd, found.step, found.sequence, found.digest, found.region)
        finally:
            os.close(fd)

    def _find(self, wanted: Wanted) -> Offer | None:
        """What is sealed, or has come; a range is waited for where it is still on its way."""
        which = (wanted.step, wanted.digest)
        sealed = (offer for offer in self._offers.values() if (offer.step, offer.digest) == which)
        coming = (each.offer(wanted) for each in self._coming if (each.step, each.digest) == which)
        return next(sealed, None) or next((offer for offer in coming if offer is not None), None)

    def _forget(self, slab: int) -> None:
        gone = self._offers.pop(slab, None)
        if gone is not None:
            os.close(gone.fd)

    def _end(self, coming: Coming) -> None:
        if coming in self._coming:
            self._coming.remove(coming)
            os.close(coming.fd)


class Coming:
    """A snapshot that is being fetched, of which others may have what has come. See `Sharing`."""

    def __init__(
        self, changed: threading.Condition, end: Callable[[Coming], None], fd: int, step: int, digest: str
    ) -> None:
        self._changed, self._end = changed, end
        self._start, self._ranges = -1, list[tuple[int, int]]()
        self.fd, self.step, self.digest, self.until = fd, step, digest, float("inf")

    def begins_at(self, head_bytes: int) -> None:
        with self._changed:
            self._start = head_bytes
            self._changed.notify_all()

    def has(self, start: int, size_bytes: int) -> None:
        with self._changed:
            self._ranges.append((start, start + size_bytes))
            self._changed.notify_all()

    def offer(self, wanted: Wanted) -> Offer | None:
        """What was asked for, where all of it has come."""
        end = wanted.start + wanted.size_bytes
        if self._start < 0 or not any(begin <= wanted.start and end <= stop for begin, stop in self._ranges):
            return None
        return Offer(_COMING, self.fd, self.step, _COMING, self.digest, Region(self._start, end))

    def close(self, *, whole: bool) -> None:
        """Give away no more where it did not become whole; else until it is offered as a sealed slab."""
        with self._changed:
            if whole:
                self.until = monotonic() + _KEPT_S
            else:
                self._end(self)
            self._changed.notify_all()
