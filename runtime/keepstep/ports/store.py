"""The one narrow interface to whatever keeps checkpoints, and the errors that say what may be tried again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

from keepstep.core.values import frozen


class StoreError(Exception):
    """The store did not do what was asked."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "look at the store's own message"


class NotFound(StoreError):
    """There is no object of that key."""

    hint: ClassVar[str] = "the object was never written, or was deleted"


class PreconditionFailed(StoreError):
    """The condition does not hold (412): somebody else decided, or an own answer was lost. Read back to know which."""

    hint: ClassVar[str] = "another writer was first; what it wrote stands"


class Conflict(StoreError):
    """Another request for the same key was under way (409): nothing is decided, ask again."""

    retryable: ClassVar[bool] = True
    hint: ClassVar[str] = "two writers met at one key; it is tried again"


class StoreUnavailable(StoreError):
    """No answer, or none that says anything. The request may or may not have been carried out."""

    retryable: ClassVar[bool] = True
    hint: ClassVar[str] = "the store can not be reached or is overloaded; it is tried again"


class StoreRefused(StoreError):
    """The store says no for good: no permission, no such bucket, read-only, full, or unfit."""

    hint: ClassVar[str] = "grant the permission, make the bucket or free the space that the message names"


class ChecksumMismatch(StoreError):
    """The bytes to be written are not those the checksum was made of; nothing was written."""

    hint: ClassVar[str] = "the source changed while it was read"


class Chunks(Protocol):
    """Bytes too many to hold at once. Iterating again gives the same bytes, so that a put can be tried again."""

    @property
    def size_bytes(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


Body = bytes | Chunks


@frozen
class ObjectStat:
    """What a store knows of an object without reading it.

    Attributes:
        size_bytes: length of the object.
        etag: differs whenever the content differs; opaque.
        modified_unix: when it was written, by the store's clock.
    """

    size_bytes: int
    etag: str
    modified_unix: float


class ObjectStore(Protocol):
    """Whole objects under keys like `job/objects/g1/s20/local-0.a1`; a put is seen whole or not at all.

    A read sees every write that was answered before it began. Every method may raise StoreUnavailable and StoreRefused.
    Implementations may be called from several threads.
    """

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        """Write an object and return its etag; it is durable when this returns.

        Args:
            key: components of letters, digits and `._=+@,-` that do not begin with a dot, joined by slashes.
            body: the content.
            if_absent: only where no object has this key.
            if_match: only where the object has this etag.
            crc32c: what the content's CRC32C must be.

        Raises:
            PreconditionFailed: a condition does not hold. With `if_match`, an absent object counts as another one.
            Conflict: undecided; ask again.
            ChecksumMismatch: `body` is not what `crc32c` says.
        """
        ...

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Deliver an object's bytes from `start`, `size` of them or all, fewer where the object ends before.

        Raises:
            NotFound: from the iterator, as all errors are.
        """
        ...

    def read(self, key: str, limit_bytes: int) -> bytes:
        """Read an object whole, and only as it was written: where the store keeps a checksum, that is verified.

        Raises:
            NotFound: there is none.
            StoreRefused: it is longer than `limit_bytes`.
        """
        ...

    def stat(self, key: str) -> ObjectStat:
        """Look at an object without reading it.

        Raises:
            NotFound: there is none.
        """
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Deliver the keys that begin with `prefix`, in no order to be relied on."""
        ...

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        """Delete an object; one that is absent is fine, unless a condition was given.

        Raises:
            PreconditionFailed: the object is absent or has another etag than `if_match`.
        """
        ...

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        """Give up puts below `prefix` that were begun before then and never finished; returns how many."""
        ...


def body_chunks(body: Body) -> Iterator[bytes]:
    """Deliver a body's bytes in pieces, whichever kind it is."""
    if isinstance(body, bytes):
        if body:
            yield body
    else:
        yield from body


def body_size(body: Body) -> int:
    """Length of a body in bytes."""
    return len(body) if isinstance(body, bytes) else body.size_bytes


def joined(pieces: Iterable[bytes], key: str, limit_bytes: int) -> bytes:
    """All pieces of an object that has no business being longer than `limit_bytes`.

    Raises:
        StoreRefused: it is longer.
    """
    taken: list[bytes] = []
    left = limit_bytes
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise StoreRefused(f"{key} is longer than {limit_bytes} bytes: that was not written by keepstep")
        taken.append(piece)
    return b"".join(taken)
