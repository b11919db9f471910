"""What checkpoints a store holds, and the copying of one to another store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from keepstep.checkpoint.commit import put_manifest, read_head, read_manifest
from keepstep.checkpoint.filing.manifest import FilesManifest, StoredFile, read_files_manifest
from keepstep.checkpoint.keys import ManifestName, files_line, head_key, is_job, manifests_prefix, parse_manifest_key
from keepstep.checkpoint.manifest import Manifest, StoredObject
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.checkpoint.tables import read_table, write_table
from keepstep.core.values import frozen
from keepstep.ports.store import ChecksumMismatch, NotFound, ObjectStore, PreconditionFailed

Document = TypeVar("Document", Manifest, FilesManifest)


@frozen
class Listed(Generic[Document]):
    """One checkpoint of a job.

    Attributes:
        manifest: None where it can not be read, and `trouble` says why.
        is_newest: HEAD names it.
    """

    name: ManifestName
    manifest: Document | None
    trouble: str
    is_newest: bool

    @property
    def label(self) -> str:
        """What it is called where one is asked for."""
        return f"{self.name.generation}-{self.name.step}-{self.name.run}"


def jobs(store: ObjectStore) -> tuple[str, ...]:
    """The jobs that have checkpoints in a store, by name."""
    heads = {key for key in store.list("") if key.endswith("/HEAD.json")}
    firsts = {
        job
        for key in heads
        if is_job(job := key.partition("/")[0]) and key in (head_key(job), head_key(files_line(job)))
    }
    return tuple(sorted(firsts))


def checkpoints(store: ObjectStore, job: str) -> tuple[Listed[Manifest], ...]:
    """All checkpoints of a job, the newest first.

    Raises:
        MalformedDocument: HEAD can not be read.
        StoreError: the store's own.
    """
    return _listed(store, job, read_manifest)


def files_checkpoints(store: ObjectStore, job: str) -> tuple[Listed[FilesManifest], ...]:
    """All checkpoints of the script's own files, likewise."""
    return _listed(store, files_line(job), read_files_manifest)


def head_trouble(store: ObjectStore, line: str, listed: Sequence[Listed[Document]]) -> str:
    """What is wrong with a line's HEAD beside the checkpoints themselves; empty where nothing is.

    Raises:
        MalformedDocument: HEAD can not be read.
        StoreError: the store's own.
    """
    head = read_head(store, line).head
    if head is None or not head.manifest:
        return ""
    newest = next((each for each in listed if each.is_newest), None)
    if newest is None:
        return f"it names {head.manifest}, which is not there"
    if newest.manifest is not None and newest.manifest.digest != head.digest:
        return f"its digest is {head.digest}, that of {newest.label} {newest.manifest.digest}"
    return ""


def _listed(
    store: ObjectStore, job: str, read: Callable[[ObjectStore, str, str], Document]
) -> tuple[Listed[Document], ...]:
    head = read_head(store, job).head
    names = {name for key in store.list(manifests_prefix(job)) if (name := parse_manifest_key(job, key)) is not None}
    found: list[Listed[Document]] = []
    for name in sorted(names, reverse=True):
        manifest, trouble = None, ""
        try:
            manifest = read(store, job, name.key(job))
        except (MalformedDocument, NotFound) as error:
            trouble = str(error)
        found.append(Listed(name, manifest, trouble, head is not None and head.manifest == name.key(job)))
    return tuple(found)


@frozen
class _Elsewhere:
    """An object of another store as a body to put; read anew whenever it is asked for."""

    store: ObjectStore
    key: str
    size_bytes: int
    told: Callable[[int], None]

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.store.get(self.key):
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
        ChecksumMismatch: the source holds other bytes than its manifest says, or the target an object of another size.
        StoreError: either store's own.
    """
    for stored in manifest.objects:
        _copy_object(source, stored, target, told)
    for rank in range(manifest.world_size):
        with suppress(NotFound, MalformedDocument):  # a checkpoint is whole without
            write_table(
                target, manifest.job, manifest.name, rank, read_table(source, manifest.job, manifest.name, rank)
            )
    put_manifest(target, manifest)


def copy_files(source: ObjectStore, manifest: FilesManifest, target: ObjectStore, told: Callable[[int], None]) -> None:
    """The same for a checkpoint of the script's own files."""
    for file in manifest.files():
        _copy_object(source, file, target, told)
    put_manifest(target, manifest)


def _copy_object(
    source: ObjectStore, stored: StoredObject | StoredFile, target: ObjectStore, told: Callable[[int], None]
) -> None:
    try:
        body = _Elsewhere(source, stored.key, stored.size_bytes, told)
        target.put(stored.key, body, if_absent=True, crc32c=int(stored.crc32c, 16))
    except PreconditionFailed:  # there already: names of objects are never used twice
        there = target.stat(stored.key).size_bytes
        if there != stored.size_bytes:
            text = f"{stored.key}: the target has {there} bytes of that name, wanted: {stored.size_bytes}, or none"
            raise ChecksumMismatch(text) from None
