"""A store that lives and dies with the process: what the simulation commits to, held to the suite of the real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from keepstep.core.values import frozen
from keepstep.ports.store import (
    Body,
    ChecksumMismatch,
    NotFound,
    ObjectStat,
    PreconditionFailed,
    body_chunks,
    joined,
)


@frozen
class _Held:
    data: bytes
    etag: str
    modified_unix: float


class MemoryStore:
    """Objects in a dictionary. `unix_time` says when they were written; the simulation gives its own."""

    def __init__(self, unix_time: Callable[[], float]) -> None:
        self._unix_time = unix_time
        self._objects: dict[str, _Held] = {}
        self._writes = 0
        self._lock = threading.Lock()

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        data = b"".join(body_chunks(body))
        if crc32c is not None:
            _check_crc(key, data, crc32c)
        with self._lock:
            held = self._objects.get(key)
            if if_absent and held is not None:
                raise PreconditionFailed(f"{key} exists")
            if if_match is not None and (held is None or held.etag != if_match):
                raise PreconditionFailed(f"{key} is another object than the one to be replaced")
            self._writes += 1
            self._objects[key] = _Held(data, f"w{self._writes}", self._unix_time())
            return self._objects[key].etag

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        data = self._find(key).data
        piece = data[start:] if size is None else data[start : start + size]
        if piece:
            yield piece

    def read(self, key: str, limit_bytes: int) -> bytes:
        return joined(self.get(key), key, limit_bytes)

    def stat(self, key: str) -> ObjectStat:
        held = self._find(key)
        return ObjectStat(len(held.data), held.etag, held.modified_unix)

    def list(self, prefix: str) -> Iterator[str]:
        with self._lock:
            keys = [key for key in self._objects if key.startswith(prefix)]
        return iter(keys)

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        with self._lock:
            held = self._objects.get(key)
            if if_match is not None and (held is None or held.etag != if_match):
                raise PreconditionFailed(f"{key} is another object than the one to be deleted")
            self._objects.pop(key, None)

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        """Nothing to give up: a put is one step here."""
        return 0

    def _find(self, key: str) -> _Held:
        with self._lock:
            held = self._objects.get(key)
        if held is None:
            raise NotFound(key)
        return held


def _check_crc(key: str, data: bytes, wanted: int) -> None:
    from awscrt import checksums

    found = checksums.crc32c(data)
    if found != wanted:
        raise ChecksumMismatch(f"{key}: CRC32C {found:08x}, {wanted:08x} was announced")
