"""Coordination: what the nodes of a job agree through (etcd; in-process on a single host)."""

from __future__ import annotations

from typing import ClassVar, Protocol

from keepstep.core.values import frozen


@frozen
class KeyValue:
    """One key as a snapshot held it."""

    key: str
    value: str
    revision: int
    """Revision of the key's last write (etcd's mod_revision): what `expect` and `guard` compare with."""
    lease: int
    """The lease the key lives and dies with; 0 for none."""


@frozen
class KeyEvent:
    """One change of one key; `value` is None where the key was deleted or its lease ended."""

    key: str
    value: str | None
    revision: int


class CoordinatorUnavailable(Exception):
    """No answer in time. The request may or may not have been carried out: read again before concluding anything."""

    retryable: ClassVar[bool] = True
    hint: ClassVar[str] = "the coordination service did not answer; it is tried again until the lease runs out"


class LeaseGone(Exception):
    """The lease has expired or was revoked, and its keys with it: whoever held it must stop acting."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "the node lost its lease; it joins again under a new one"


class CoordinatorRefused(Exception):
    """The request itself is not acceptable: too large, or not permitted. The same request will be refused again."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "the coordination service refused a request; its message says why"


class WatchLost(Exception):
    """Events between the last one delivered and now can not be had: read the prefix again and watch from there.

    Either the history was compacted away, or another cluster (one that came back empty) answers at the endpoints.
    """

    retryable: ClassVar[bool] = True
    hint: ClassVar[str] = "the event history is gone; keys are read again"


class KeyWatch(Protocol):
    """An asynchronous iterator over changes under a prefix; each list holds whole revisions, in order."""

    def __aiter__(self) -> KeyWatch: ...

    async def __anext__(self) -> list[KeyEvent]: ...

    async def aclose(self) -> None:
        """Stop watching and give back what it holds; the iteration then ends. Closing twice is fine."""
        ...


REQUEST_BYTES_MAX = 1_572_864
"""The largest key and value together, in bytes: what etcd takes unless it is told to take more."""

Span = tuple[str, str]
"""From, and to but without, in byte order: of keys below a prefix, the part of those that are meant."""


class Coordinator(Protocol):
    """Leases, compare-and-swap and an ordered stream of changes over a small tree of UTF-8 keys and values.

    Every method but `watch` raises CoordinatorUnavailable when there is no answer within the adapter's timeout, and
    CoordinatorRefused where asking again would not help.
    Revisions grow by one with every change and are shared by all keys; they start again only where the data is lost.
    """

    async def grant(self, ttl_s: float) -> int:
        """Open a lease that ends `ttl_s` seconds after the last `keep_alive`; etcd rounds up to whole seconds."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease and return the seconds granted, counted from before this call.

        Raises:
            LeaseGone: the lease had ended already.
        """
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; a lease that is gone already is fine."""
        ...

    async def put(
        self,
        key: str,
        value: str,
        *,
        lease: int = 0,
        expect: int | None = None,
        guard: tuple[str, int] | None = None,
    ) -> int | None:
        """Write a key, if the comparisons hold at that instant.

        Args:
            key: the key.
            value: the new value.
            lease: the lease to bind the key to; 0 binds it to none.
            expect: the revision that the key must have; 0 where it must be absent.
            guard: another key and the revision that it must have (0: absent): "only while I am the leader".

        Returns:
            The revision of this write, or None where a comparison failed.

        Raises:
            LeaseGone: the lease does not exist (any more).
        """
        ...

    async def delete(self, key: str, *, expect: int | None = None, prefix: bool = False) -> bool:
        """Delete a key, or all keys that begin with `key`; True where at least one was deleted.

        Args:
            key: the key, or the prefix.
            expect: the revision that the key must have; not with `prefix`.
            prefix: delete every key that begins with `key`.
        """
        ...

    async def read(self, prefix: str, span: Span | None = None) -> tuple[int, list[KeyValue]]:
        """Return all keys that begin with `prefix`, in byte order of the keys, and the revision they were read at.

        With `span` only those whose rest lies in it.
        The read is linearizable: it sees every write that was answered before it began.
        """
        ...

    def watch(self, prefix: str, after_revision: int, span: Span | None = None) -> KeyWatch:
        """Deliver every change of revision above `after_revision` once, in order, from now on; `span` as in `read`.

        It goes on by itself after a cut connection. It belongs to the cluster of the latest `read`: read first, then
        watch from the revision that `read` returned.

        Raises:
            WatchLost: from the iterator; it has ended.
        """
        ...

    async def close(self) -> None:
        """Stop watches, threads and connections; leases are left to run out."""
        ...
