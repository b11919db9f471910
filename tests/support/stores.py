"""Stores that misbehave at a chosen moment, and checkpoints to put into them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from keepstep.adapters.store_memory import MemoryStore
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.manifest import Manifest, build_manifest
from keepstep.checkpoint.restore import Fetched, fetch
from keepstep.checkpoint.upload import UploadOrder, upload
from keepstep.ports.store import Body, ObjectStat, ObjectStore, StoreUnavailable
from tests.support.slabs import file_bytes, memory_file, slab_bytes


def memory_store(now_unix: float = 1_700_000_000.0) -> MemoryStore:
    return MemoryStore(lambda: now_unix)


class TroubledStore:
    """Calls `before` and `after` with each operation's number and name; what they raise is the store's answer.

    Raised by `before` the operation was not carried out; raised by `after` it was, and its answer is lost.
    """

    def __init__(
        self,
        inner: ObjectStore,
        before: Callable[[int, str], None] = lambda number, name: None,
        after: Callable[[int, str], None] = lambda number, name: None,
    ) -> None:
        self._inner = inner
        self._before = before
        self._after = after
        self.operations = 0

    def _around(self, name, ask):
        number = self.operations
        self.operations += 1
        self._before(number, name)
        answer = ask()
        self._after(number, name)
        return answer

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        return self._around(
            "put", lambda: self._inner.put(key, body, if_absent=if_absent, if_match=if_match, crc32c=crc32c)
        )

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        yield from self._around("get", lambda: list(self._inner.get(key, start, size)))

    def read(self, key: str, limit_bytes: int) -> bytes:
        return self._around("get", lambda: self._inner.read(key, limit_bytes))

    def stat(self, key: str) -> ObjectStat:
        return self._around("stat", lambda: self._inner.stat(key))

    def list(self, prefix: str) -> Iterator[str]:
        return self._around("list", lambda: iter(tuple(self._inner.list(prefix))))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._around("delete", lambda: self._inner.delete(key, if_match=if_match))

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        return self._around("discard", lambda: self._inner.discard_unfinished(prefix, before_unix))


def fail_at(number: int, error: Exception | None = None) -> Callable[[int, str], None]:
    """A hook that raises at the operation of that number, and at no other."""

    def hook(now: int, name: str) -> None:
        if now == number:
            raise error or StoreUnavailable(f"trouble at operation {now}, {name}")

    return hook


def rank_slab(rank: int, step: int, replicated: bytes | None = None) -> bytes:
    """A slab whose replicated region depends on the step, and its local one on the rank, too."""
    shared = f"weights after step {step}; ".encode() * 9 if replicated is None else replicated
    return slab_bytes({"replicated/w": shared, "local/moments": f"rank {rank} at {step}".encode() * (rank + 1)})


def stored_checkpoint(
    store: ObjectStore, name: ManifestName, world_size: int = 2, job: str = "job", created_unix: int = 1_700_000_000
) -> Manifest:
    """Upload all ranks' objects of a checkpoint and make its manifest, which is not written yet."""
    objects, digest = [], ""
    for rank in range(world_size):
        content = rank_slab(rank, name.step)
        fd = memory_file(content)
        try:
            done = upload(store, fd, UploadOrder(job, name, rank, world_size, len(content)))
        finally:
            os.close(fd)
        objects += done.objects
        digest = done.replicated
    return build_manifest(job, name, world_size, digest, objects, created_unix)


def committed(store: ObjectStore, generation: int, step: int, run: str = "r", world_size: int = 2) -> Manifest:
    """A whole checkpoint, committed."""
    manifest = stored_checkpoint(store, ManifestName(generation, step, run), world_size)
    commit(store, manifest)
    return manifest


def fetched(store: ObjectStore, manifest: Manifest, rank: int = 0) -> tuple[Fetched, bytes]:
    """A rank's slab back in memory: what the fetch tells of it, and its bytes."""
    fd = memory_file()
    try:
        return fetch(store, manifest, rank, fd), file_bytes(fd)
    finally:
        os.close(fd)
