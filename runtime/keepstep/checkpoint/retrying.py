"""Patience, as a wrapper over any store: what may be tried again is tried again, a bounded number of times."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from threading import Event
from typing import TypeVar

from keepstep.core.values import frozen
from keepstep.ports.store import Body, Conflict, ObjectStat, ObjectStore, StoreUnavailable

T = TypeVar("T")


@frozen
class Patience:
    """How often and how long; the waits double from `first_s` up to `longest_s`."""

    attempts: int = 5
    first_s: float = 0.2
    longest_s: float = 5.0

    def wait_s(self, key: str, attempt: int) -> float:
        """Seconds before the attempt after `attempt` (0 the first), spread by a hash so that ranks differ."""
        draw = int.from_bytes(hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=4).digest(), "big") / 2**32
        return float(min(self.first_s * 2**attempt, self.longest_s) * (0.5 + draw / 2))


def _pause(seconds: float) -> None:
    Event().wait(seconds)


class RetryingStore:
    """A store that asks again on StoreUnavailable and Conflict, and lets every other error through.

    A conditional put whose answer got lost is answered PreconditionFailed the second time: who uses one reads back.
    """

    def __init__(
        self, inner: ObjectStore, patience: Patience | None = None, pause: Callable[[float], None] = _pause
    ) -> None:
        self._inner = inner
        self._patience = patience or Patience()
        self._pause = pause

    def _again(self, key: str, ask: Callable[[], T]) -> T:
        attempt = 0
        while True:
            try:
                return ask()
            except (StoreUnavailable, Conflict):
                if attempt + 1 >= self._patience.attempts:
                    raise
            self._pause(self._patience.wait_s(key, attempt))
            attempt += 1

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        return self._again(
            key, lambda: self._inner.put(key, body, if_absent=if_absent, if_match=if_match, crc32c=crc32c)
        )

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Go on behind the last byte delivered where a read breaks off; objects do not change under their names."""
        done, attempt = 0, 0
        while True:
            try:
                for piece in self._inner.get(key, start + done, None if size is None else size - done):
                    done += len(piece)
                    attempt = 0
                    yield piece
                return
            except (StoreUnavailable, Conflict):
                if attempt + 1 >= self._patience.attempts:
                    raise
            self._pause(self._patience.wait_s(key, attempt))
            attempt += 1

    def read(self, key: str, limit_bytes: int) -> bytes:
        return self._again(key, lambda: self._inner.read(key, limit_bytes))

    def stat(self, key: str) -> ObjectStat:
        return self._again(key, lambda: self._inner.stat(key))

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self._again(prefix, lambda: tuple(self._inner.list(prefix))))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._again(key, lambda: self._inner.delete(key, if_match=if_match))

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        return self._again(prefix, lambda: self._inner.discard_unfinished(prefix, before_unix))
