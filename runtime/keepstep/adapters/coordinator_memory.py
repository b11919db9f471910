"""The coordinator of a job with a single host: the same promises as etcd's, kept in this process."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from keepstep.ports import (
    REQUEST_BYTES_MAX,
    CoordinatorRefused,
    CoordinatorUnavailable,
    KeyEvent,
    KeyValue,
    LeaseGone,
    Span,
    WatchLost,
)

_HISTORY_MAX = 10_000
_PENDING_MAX = 10_000


@dataclass
class _Lease:
    ttl_s: float
    end_s: float
    keys: set[str] = field(default_factory=set)


class MemoryWatch:
    """An asynchronous iterator over lists of events; see `keepstep.ports.KeyWatch`."""

    def __init__(self, selects: Callable[[str], bool], leave: Callable[[MemoryWatch], None]) -> None:
        self._selects = selects
        self._leave = leave
        self._inbox: asyncio.Queue[list[KeyEvent] | WatchLost | None] = asyncio.Queue()

    def post(self, item: list[KeyEvent] | WatchLost | None) -> None:
        """Hand over what is selected, or the end; who does not listen for too long loses the watch."""
        if isinstance(item, list):
            item = [event for event in item if self._selects(event.key)]
            if item and self._inbox.qsize() >= _PENDING_MAX:
                self._leave(self)
                item = WatchLost(f"{_PENDING_MAX} changes wait already")
        if item != []:
            self._inbox.put_nowait(item)

    def __aiter__(self) -> MemoryWatch:
        return self

    async def __anext__(self) -> list[KeyEvent]:
        item = await self._inbox.get()
        if isinstance(item, list):
            return item
        self._inbox.put_nowait(None)  # whoever asks again hears the end again
        if item is None:
            raise StopAsyncIteration
        raise item

    async def aclose(self) -> None:
        self._leave(self)
        while not self._inbox.empty():
            self._inbox.get_nowait()
        self._inbox.put_nowait(None)


class MemoryCoordinator:
    """The coordination port in this process; see `keepstep.ports.Coordinator`.

    Leases end by the clock given. A timer of the event loop looks in at each lease's end, so that its keys vanish
    without anybody asking; under a virtual clock, call `expire` after moving it.
    """

    def __init__(self, now: Callable[[], float], *, history_max: int = _HISTORY_MAX) -> None:
        """Begin empty.

        Args:
            now: a monotonic clock, in seconds.
            history_max: changes that a watch can go back; older ones count as compacted.
        """
        self._now = now
        self._revision = 1
        self._lease_count = 0
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._history: deque[list[KeyEvent]] = deque(maxlen=history_max)
        self._compacted = 0
        self._watches: list[MemoryWatch] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def grant(self, ttl_s: float) -> int:
        self._begin()
        self._lease_count += 1
        whole_s = float(max(1, math.ceil(ttl_s)))
        self._leases[self._lease_count] = _Lease(whole_s, self._now() + whole_s)
        self._arm()
        return self._lease_count

    async def keep_alive(self, lease: int) -> float:
        self._begin()
        held = self._lease(lease)
        held.end_s = self._now() + held.ttl_s
        self._arm()
        return held.ttl_s

    async def revoke(self, lease: int) -> None:
        self._begin()
        if lease in self._leases:
            self._end_lease(lease)

    async def put(
        self,
        key: str,
        value: str,
        *,
        lease: int = 0,
        expect: int | None = None,
        guard: tuple[str, int] | None = None,
    ) -> int | None:
        self._begin()
        if not key:
            raise CoordinatorRefused("key is not provided")
        if len(key.encode()) + len(value.encode()) > REQUEST_BYTES_MAX:
            raise CoordinatorRefused("request is too large")
        if expect is not None and self._revision_of(key) != expect:
            return None
        if guard is not None and self._revision_of(guard[0]) != guard[1]:
            return None
        held = self._lease(lease) if lease else None
        self._forget(key)
        if held is not None:
            held.keys.add(key)
        self._keys[key] = KeyValue(key, value, self._revision + 1, lease)
        return self._record([(key, value)])

    async def delete(self, key: str, *, expect: int | None = None, prefix: bool = False) -> bool:
        if prefix and expect is not None:
            raise ValueError("a prefix has no revision to expect")
        self._begin()
        if prefix:
            return self._delete([name for name in self._keys if name.startswith(key)])
        if key not in self._keys or expect not in (None, self._keys[key].revision):
            return False
        return self._delete([key])

    async def read(self, prefix: str, span: Span | None = None) -> tuple[int, list[KeyValue]]:
        self._begin()
        found = [kv for key, kv in self._keys.items() if _selects(prefix, span, key)]
        return self._revision, sorted(found, key=lambda kv: kv.key.encode())

    def watch(self, prefix: str, after_revision: int, span: Span | None = None) -> MemoryWatch:
        self._begin()
        watch = MemoryWatch(partial(_selects, prefix, span), self._leave)
        if after_revision < self._compacted:
            watch.post(WatchLost(f"revisions up to {self._compacted} are forgotten"))
            return watch
        if after_revision > self._revision:
            watch.post(WatchLost(f"revision {after_revision} was never reached"))
            return watch
        for events in self._history:
            if events[0].revision > after_revision:
                watch.post(events)
        self._watches.append(watch)
        return watch

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for watch in self._watches:
            watch.post(None)
        self._watches.clear()

    def expire(self) -> None:
        """End every lease whose time is over; wanted only where the clock is virtual."""
        now_s = self._now()
        for number in [number for number, lease in self._leases.items() if lease.end_s <= now_s]:
            self._end_lease(number)

    def _begin(self) -> None:
        if self._closed:
            raise CoordinatorUnavailable("closed")
        self.expire()

    def _leave(self, watch: MemoryWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def _arm(self) -> None:
        """Set the timer to the next end of a lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            next_s = min(lease.end_s for lease in self._leases.values())
            delay_s = max(0.001, next_s - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self.expire()
        self._arm()

    def _lease(self, number: int) -> _Lease:
        if number not in self._leases:
            raise LeaseGone(f"lease {number} has expired")
        return self._leases[number]

    def _end_lease(self, number: int) -> None:
        self._delete(sorted(self._leases.pop(number).keys))

    def _revision_of(self, key: str) -> int:
        return self._keys[key].revision if key in self._keys else 0

    def _forget(self, key: str) -> None:
        """Take the key out, and off its lease."""
        old = self._keys.pop(key, None)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(key)

    def _delete(self, keys: Sequence[str]) -> bool:
        for key in keys:
            self._forget(key)
        if keys:
            self._record([(key, None) for key in keys])
        return bool(keys)

    def _record(self, changes: Sequence[tuple[str, str | None]]) -> int:
        """Give all changes one new revision, and tell the watches."""
        self._revision += 1
        events = [KeyEvent(key, value, self._revision) for key, value in changes]
        if len(self._history) == self._history.maxlen:
            self._compacted = self._history[0][0].revision
        self._history.append(events)
        for watch in tuple(self._watches):
            watch.post(events)
        return self._revision


def _selects(prefix: str, span: Span | None, key: str) -> bool:
    if not key.startswith(prefix):
        return False
    return span is None or span[0].encode() <= key[len(prefix) :].encode() < span[1].encode()
