"""What checkpoints a store holds, and the copying of one to another store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from keepstep.checkpoint.commit import put_manifest, read_head, read_manifest
from keepstep.checkpoint.keys import ManifestName, head_key, is_job, manifests_prefix, parse_manifest_key
from keepstep.checkpoint.manifest import Manifest, StoredObject
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.checkpoint.tables import read_table, write_table
from keepstep.ports.store import NotFound, ObjectStore, PreconditionFailed


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a job.

    Attributes:
        manifest: None where it can not be read, and `trouble` says why.
        is_newest: HEAD names it.
    """

    name: ManifestName
    manifest: Manifest | None
    trouble: str
    is_newest: bool


def jobs(store: ObjectStore) -> tuple[str, ...]:
    """The jobs that have checkpoints in a store, by name."""
    firsts = {job for key in store.list("") if is_job(job := key.partition("/")[0]) and key == head_key(job)}
    return tuple(sorted(firsts))


def checkpoints(store: ObjectStore, job: str) -> tuple[Listed, ...]:
    """All checkpoints of a job, the newest first.

    Raises:
        MalformedDocument: HEAD can not be read.
        StoreError: the store's own.
    """
    head = read_head(store, job).head
    names = {name for key in store.list(manifests_prefix(job)) if (name := parse_manifest_key(job, key)) is not None}
    found = []
    for name in sorted(names, reverse=True):
        manifest, trouble = None, ""
        try:
            manifest = read_manifest(store, job, name.key(job))
        except (MalformedDocument, NotFound) as error:
            trouble = str(error)
        found.append(Listed(name, manifest, trouble, head is not None and head.manifest == name.key(job)))
    return tuple(found)


@dataclass(frozen=True)
class _Elsewhere:
    """An object of another store as a body to put; read anew whenever it is asked for."""

    store: ObjectStore
    stored: StoredObject
    told: Callable[[int], None]

    @property
    def size_bytes(self) -> int:
        return self.stored.size_bytes

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.store.get(self.stored.key):
            self.told(len(piece))
            yield piece


def copy(source: ObjectStore, manifest: Manifest, target: ObjectStore, told: Callable[[int], None]) -> None:
    """Copy a checkpoint, its manifest last; every object's CRC32C is checked on the way. HEAD stays as it is.

    Args:
        source: where it is.
        manifest: which one.
        target: where it is to be.
        told: told of the bytes that were read.

    Raises:
        StaleStep: the target has another checkpoint of this name.
        ChecksumMismatch: the source holds other bytes than its manifest says.
        StoreError: either store's own.
    """
    for stored in manifest.objects:
        with suppress(PreconditionFailed):  # there already: names of objects are never used twice
            body = _Elsewhere(source, stored, told)
            target.put(stored.key, body, if_absent=True, crc32c=int(stored.crc32c, 16))
    for rank in range(manifest.world_size):
        with suppress(NotFound, MalformedDocument):  # a checkpoint is whole without
            write_table(
                target, manifest.job, manifest.name, rank, read_table(source, manifest.job, manifest.name, rank)
            )
    put_manifest(target, manifest)
