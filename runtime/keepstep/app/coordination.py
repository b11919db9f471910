"""The coordinator as the fold sees it: leases kept alive, records put, changes under the job's prefix turned into
events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep.adapters.clock import Clock, sleep
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.codec import Undecodable, decode_record, encode_record
from keepstep.core.events import Event
from keepstep.core.records import LEASED, NOT_OF_NODES, Record
from keepstep.ports import (
    Coordinator,
    CoordinatorRefused,
    CoordinatorUnavailable,
    KeyEvent,
    KeyWatch,
    LeaseGone,
    Span,
    WatchLost,
)

_AGAIN_S = 0.2
_READ_AGAIN_S = 0.5
_REVOKE_S = 1.0
_WRITTEN_MAX = 32


def prefix_of(job: str) -> str:
    """What the keys of a job begin with."""
    return f"/keepstep/{job}/"


class Coordination:
    """One node's dealings with the coordinator; each failure to reach it is an event, none is an end."""

    def __init__(
        self,
        coordinator: Coordinator,
        job: str,
        clock: Clock,
        post: Callable[[Event], None],
        log: Callable[[str], None],
    ) -> None:
        self._coordinator, self._clock, self._post, self._log = coordinator, clock, post, log
        self.prefix = prefix_of(job)
        self._span: Span | None = NOT_OF_NODES
        self._changes: KeyWatch | None = None
        self._held: int | None = None
        self._written: dict[str, tuple[str, Record]] = {}
        self._finished = False

    async def hold_lease(self, action: a.GrantLease) -> None:
        """Get a lease and renew it, at three times the pace that would do, until it is lost or another one is asked
        for.
        """
        try:
            sent = self._clock.now()
            lease = await self._coordinator.grant(action.ttl_s)
        except (CoordinatorUnavailable, CoordinatorRefused) as error:
            self._post(e.OperationFailed(action.operation, str(error)))
            return
        if self._finished:  # nobody would renew it or wait for it
            await self.revoke(lease)
            return
        self._held = lease
        self._post(e.LeaseGranted(lease, sent + action.ttl_s))
        while self._held == lease:
            await sleep(action.ttl_s / 3)
            await self._renew(lease)

    async def _renew(self, lease: int) -> None:
        while self._held == lease:
            sent = self._clock.now()
            try:
                granted_s = await self._coordinator.keep_alive(lease)
            except LeaseGone:
                self._held = None
                self._post(e.LeaseLost(lease))
            except (CoordinatorUnavailable, CoordinatorRefused):
                await sleep(_AGAIN_S)
            else:
                self._post(e.LeaseRenewed(lease, sent + granted_s))
                return

    async def revoke(self, lease: int) -> None:
        """Give a lease back, if that can be done soon; it ends by itself otherwise."""
        if self._held == lease:
            self._held = None
        try:
            async with asyncio.timeout(_REVOKE_S):
                await self._coordinator.revoke(lease)
        except (CoordinatorUnavailable, CoordinatorRefused, TimeoutError) as error:
            self._log(f"lease not revoked: {str(error) or 'no answer'}")

    async def finish(self) -> None:
        """Let go of the lease that is still held or asked for, so that the others need not wait for its end."""
        self._finished = True
        if self._held is not None:
            await self.revoke(self._held)

    async def put(self, action: a.Put) -> None:
        """Write a record, if it still is what it was and this node still leads where that is asked for."""
        record = action.record
        key, text = self.prefix + record.key, encode_record(record)
        self._note(key, text, record)
        try:
            revision = await self._coordinator.put(
                key,
                text,
                lease=action.lease if isinstance(record, LEASED) else 0,
                expect=None if action.expect < 0 else action.expect,
                guard=(self.prefix + "leader", action.guard) if action.guard else None,
            )
        except (CoordinatorUnavailable, CoordinatorRefused) as error:
            self._post(e.OperationFailed(action.operation, str(error)))
        except LeaseGone:
            self._post(e.PutRefused(action.operation))
            self._post(e.LeaseLost(action.lease))
        else:
            if revision is None:
                self._post(e.PutRefused(action.operation))
            else:
                self._post(e.RecordPut(action.operation, record, revision))

    def _note(self, key: str, text: str, record: Record) -> None:
        """Know an own record by its text: what reads records takes a while to make, and a lone host never needs it."""
        self._written.pop(key, None)
        self._written[key] = text, record
        if len(self._written) > _WRITTEN_MAX:
            del self._written[next(iter(self._written))]

    async def forget(self, action: a.ForgetRecords) -> None:
        """Delete records that nobody needs; what can not be deleted now stays until the job's etcd goes."""
        try:
            await self._coordinator.delete(self.prefix + action.prefix, prefix=True)
        except (CoordinatorUnavailable, CoordinatorRefused) as error:
            self._log(f"{action.prefix} not deleted: {error}")

    async def watch_all(self) -> None:
        """Watch what members say of themselves, too, from now on: read anew, and told as a whole."""
        self._span = None
        if self._changes is not None:
            await self._changes.aclose()

    async def watch(self) -> None:
        """Read what is watched, then follow the changes; begin again whenever their thread is lost. Never ends."""
        while True:
            span = self._span
            try:
                revision, found = await self._coordinator.read(self.prefix, span)
                records = [(self._decode(kv.key, kv.value), kv.revision) for kv in found]
                read = tuple((record, written) for record, written in records if record is not None)
                self._post(e.ClusterRead(read, whole=span is None))
                await self._follow(revision, span)
            except WatchLost as error:
                self._log(f"watch lost, reading again: {error}")
            except (CoordinatorUnavailable, CoordinatorRefused):
                await sleep(_READ_AGAIN_S)

    async def _follow(self, revision: int, span: Span | None) -> None:
        if span != self._span:
            return
        self._changes = changes = self._coordinator.watch(self.prefix, revision, span)
        try:
            async for batch in changes:
                told = [event for change in batch if (event := self._event(change)) is not None]
                if told:
                    self._post(told[0] if len(told) == 1 else e.RecordsChanged(tuple(told)))
        finally:
            self._changes = None
            await changes.aclose()

    def _event(self, change: KeyEvent) -> e.RecordSeen | e.RecordGone | None:
        """What has changed, where it is understood."""
        if change.value is None:
            return e.RecordGone(change.key.removeprefix(self.prefix), change.revision)
        record = self._decode(change.key, change.value)
        return None if record is None else e.RecordSeen(record, change.revision)

    def _decode(self, key: str, value: str) -> Record | None:
        text, record = self._written.get(key, ("", None))
        if record is not None and text == value:
            return record
        try:
            return decode_record(value)
        except Undecodable as error:
            self._log(f"{key} is not understood and passed over: {error}")
            return None
