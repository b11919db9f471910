"""A store that tells what is done with it, for what people are shown meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keepstep.checkpoint.retrying import Patience, RetryingStore
from keepstep.ports.store import ObjectStore


class ToldStore(RetryingStore):
    """A store that tells of the bytes that are read from it, and of each object that is deleted."""

    def __init__(
        self,
        inner: ObjectStore,
        on_read: Callable[[int], None] = lambda size_bytes: None,
        on_deleted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(inner, Patience(attempts=1))
        self._on_read, self._on_deleted = on_read, on_deleted

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        for piece in super().get(key, start, size):
            self._on_read(len(piece))
            yield piece

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        super().delete(key, if_match=if_match)
        self._on_deleted()
