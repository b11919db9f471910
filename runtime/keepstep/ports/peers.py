"""Peers: other hosts of the job, as far as they give away the bytes of a snapshot that they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from keepstep.core.values import frozen


class PeerAway(Exception):
    """A peer can not be reached, is not believed, broke off, or is too slow."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "the bytes are had from the next peer, or from the store"


class PeerLacks(Exception):
    """A peer holds no such snapshot, or not any more."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "the bytes are had from the next peer, or from the store"


@frozen
class Wanted:
    """A range of the replicated region of one snapshot.

    Attributes:
        step: the completed step.
        digest: of the whole region.
        start: where the range begins within the region.
        size_bytes: its length.
        wait_s: how long it may be waited for where it is on its way to who is asked; whole seconds.
    """

    step: int
    digest: str
    start: int
    size_bytes: int
    wait_s: float = 0.0


class Sharing(Protocol):
    """What is being fetched here, as other hosts may have it already."""

    def begins_at(self, head_bytes: int) -> None:
        """The replicated region begins there in the file."""
        ...

    def has(self, start: int, size_bytes: int) -> None:
        """A range of the replicated region has come, as far as that can be told by now."""
        ...


class Peer(Protocol):
    """One other host. May be asked from several threads."""

    @property
    def name(self) -> str: ...

    def read(self, wanted: Wanted, take: Callable[[memoryview], None], deadline: float) -> None:
        """Deliver a range in order, piece by piece; a piece is the caller's during the call only.

        Nothing says that these are the bytes that were wanted: whoever takes them checks them.

        Args:
            deadline: second of CLOCK_MONOTONIC by which all of it is to be here.

        Raises:
            PeerLacks: the peer has no such snapshot.
            PeerAway: any other trouble with it; pieces may have been delivered.
        """
        ...

    def close(self) -> None:
        """Let go of its connections."""
        ...
