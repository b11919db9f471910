"""EtcdCoordinator: the coordination port on etcd.

Blocking requests run in two small pools: one thread with a connection of its own for leases, so that a renewal never
waits behind a megabyte of anything, and a few threads for the rest.

*Which etcd is this?* An embedded etcd keeps its data in memory: when its host dies and comes back, another, empty etcd
answers at the same address, under the same cluster id, and its revisions may even have overtaken those seen before. A
comparison made for the old one could hold in the new one by accident. So the first client to come writes a marker with
a random value; every comparison includes the marker's value, and so does every reconnect of a watch.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from keepstep.adapters.etcd.gateway import Endpoints, Gateway, Json, Request, decode, encode, key_values, prefix_range
from keepstep.adapters.etcd.watch import EtcdWatch
from keepstep.ports import (
    REQUEST_BYTES_MAX,
    CoordinatorRefused,
    CoordinatorUnavailable,
    KeyValue,
    LeaseGone,
    Span,
    TlsFiles,
)

_BULK_THREADS = 3
_MARKER_ATTEMPTS = 3


class _Lane:
    """A bounded pool of threads, each request with a connection that no other request uses meanwhile."""

    def __init__(self, name: str, threads: int, endpoints: Endpoints, timeout_s: float) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = deque(Gateway(endpoints, timeout_s) for _ in range(threads))

    def call(self, request: Request, loop: asyncio.AbstractEventLoop, deadline_s: float) -> Json:
        gateway = self._idle.pop()
        try:
            return gateway.call(request, lambda: deadline_s - loop.time())
        finally:
            self._idle.append(gateway)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        for gateway in self._idle:
            gateway.close()


@dataclass
class _Marker:
    """The value of the marker of the etcd that this node believes in; None before the first contact."""

    value: str | None = None


class EtcdCoordinator:
    """The coordination port on etcd 3.4 or later; see `keepstep.ports.Coordinator`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = 2.0,
        idle_s: float = 10.0,
        marker_key: str = "/keepstep/.cluster",
    ) -> None:
        """Prepare without connecting.

        Args:
            endpoints: client URLs of the members, tried in turn.
            tls: what https endpoints are asked with.
            timeout_s: seconds after which a request counts as unanswered, over all endpoints.
            idle_s: seconds of silence after which a watch makes sure that it still hears the right etcd.
            marker_key: the key of the marker, outside of every prefix that is read or watched.
        """
        self._endpoints = Endpoints(endpoints, tls)
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._marker_key = marker_key
        self._marker = _Marker()
        self._leases = _Lane("etcd-lease", 1, self._endpoints, timeout_s)
        self._bulk = _Lane("etcd-bulk", _BULK_THREADS, self._endpoints, timeout_s)
        self._watches: set[EtcdWatch] = set()
        self._closed = False

    def use(self, endpoints: Sequence[str]) -> None:
        """Ask these endpoints from the next request on; they are of the same etcd."""
        self._endpoints.use(endpoints)

    @property
    def distrusted(self) -> int:
        """How often a certificate was not believed, by this node or by a member of etcd."""
        return self._endpoints.distrusted

    def renew(self) -> None:
        """Prove itself with what lies in the files of `tls` now."""
        self._endpoints.renew()

    async def grant(self, ttl_s: float) -> int:
        # Repeatable: a lease whose number got lost runs out by itself.
        body = {"TTL": max(1, math.ceil(ttl_s)), "ID": 0}
        answer = await self._ask(self._leases, Request("/lease/grant", body, repeatable=True))
        return int(answer["ID"])

    async def keep_alive(self, lease: int) -> float:
        answer = await self._ask(self._leases, Request("/lease/keepalive", {"ID": lease}, repeatable=True))
        result = answer.get("result")
        if result is None:
            raise CoordinatorUnavailable(f"no renewal: {answer.get('error')}")
        ttl_s = float(result.get("TTL", 0))
        if ttl_s <= 0:
            raise LeaseGone(f"lease {lease:x} has expired")
        return ttl_s

    async def revoke(self, lease: int) -> None:
        try:
            await self._ask(self._leases, Request("/lease/revoke", {"ID": lease}, repeatable=True))
        except LeaseGone:
            return

    async def put(
        self,
        key: str,
        value: str,
        *,
        lease: int = 0,
        expect: int | None = None,
        guard: tuple[str, int] | None = None,
    ) -> int | None:
        size_bytes = len(key.encode()) + len(value.encode())
        if size_bytes > REQUEST_BYTES_MAX:  # etcd would say so only after it had read it all
            raise CoordinatorRefused(f"{key}: {size_bytes} bytes are too large for etcd, at most {REQUEST_BYTES_MAX}")
        conditions = [] if expect is None else [(key, expect)]
        if guard is not None:
            conditions.append(guard)
        written = {"key": encode(key), "value": encode(value), "lease": lease}
        answer = await self._transact(conditions, {"request_put": written})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    async def delete(self, key: str, *, expect: int | None = None, prefix: bool = False) -> bool:
        if prefix and expect is not None:
            raise ValueError("a prefix has no revision to expect")
        conditions = [] if expect is None else [(key, expect)]
        selected = prefix_range(key) if prefix else {"key": encode(key)}
        answer = await self._transact(conditions, {"request_delete_range": selected})
        if not answer.get("succeeded"):
            return False
        return int(answer["responses"][0]["response_delete_range"].get("deleted", 0)) > 0

    async def read(self, prefix: str, span: Span | None = None) -> tuple[int, list[KeyValue]]:
        ranges = [{"request_range": {"key": encode(self._marker_key)}}, {"request_range": prefix_range(prefix, span)}]
        for _ in range(_MARKER_ATTEMPTS):
            answer = await self._ask(self._bulk, Request("/kv/txn", {"success": ranges}, repeatable=True))
            marker, found = (key_values(part["response_range"]) for part in answer["responses"])
            if marker:
                self._marker.value = marker[0].value
                kept = [kv for kv in found if kv.key != self._marker_key]
                return int(answer["header"]["revision"]), kept
            await self._mark()
        raise CoordinatorUnavailable("etcd keeps losing its data")

    def watch(self, prefix: str, after_revision: int, span: Span | None = None) -> EtcdWatch:
        self._refuse_if_closed()
        gateway = Gateway(self._endpoints, self._timeout_s)
        selection = prefix_range(prefix, span)
        watch = EtcdWatch(gateway, selection, after_revision, marker=(self._marker_key, self._marker.value))
        self._watches = {other for other in self._watches if not other.ended}
        self._watches.add(watch)
        watch.start(self._timeout_s, self._idle_s)
        return watch

    async def close(self) -> None:
        self._closed = True
        for watch in self._watches:
            await watch.aclose()
        self._watches.clear()
        for lane in (self._leases, self._bulk):
            # Bounded: no request outlives its own timeout.
            await asyncio.to_thread(lane.close)

    async def _transact(self, conditions: Sequence[tuple[str, int]], action: Json) -> Json:
        """Do `action` where every key has the revision given (0: absent) in the etcd that this node has read from."""
        compare: list[dict[str, Any]] = [
            {"key": encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
            for key, revision in conditions
        ]
        if compare:
            marker = self._marker.value or await self._mark()
            compare.append(
                {"key": encode(self._marker_key), "target": "VALUE", "result": "EQUAL", "value": encode(marker)}
            )
        return await self._ask(self._bulk, Request("/kv/txn", {"compare": compare, "success": [action]}, False))

    async def _mark(self) -> str:
        """Write the marker where there is none; return its value."""
        key = encode(self._marker_key)
        mine = uuid.uuid4().hex
        body = {
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}],
            "success": [{"request_put": {"key": key, "value": encode(mine)}}],
            "failure": [{"request_range": {"key": key}}],
        }
        answer = await self._ask(self._bulk, Request("/kv/txn", body, repeatable=True))
        if answer.get("succeeded"):
            self._marker.value = mine
        else:
            self._marker.value = decode(answer["responses"][0]["response_range"]["kvs"][0]["value"])
        return self._marker.value

    async def _ask(self, lane: _Lane, request: Request) -> Json:
        self._refuse_if_closed()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                return await loop.run_in_executor(lane.pool, lane.call, request, loop, deadline_s)
        except TimeoutError:
            raise CoordinatorUnavailable(f"no answer to {request.path} within {self._timeout_s} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                self._refuse_if_closed()  # `close` has dropped the request while it waited for a thread
            raise

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise CoordinatorUnavailable("closed")
