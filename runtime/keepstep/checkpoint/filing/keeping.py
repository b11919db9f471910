"""Copies of a script's files into the store, committed as one; what did not change is not uploaded again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from keepstep.checkpoint.aggregate import CorruptObject
from keepstep.checkpoint.commit import Fenced, commit, new_nonce, newest_checkpoint, read_head
from keepstep.checkpoint.digests import ShortSlab, file_chunks, file_crc32c
from keepstep.checkpoint.files.sets import ListedFile
from keepstep.checkpoint.files.unfit import ChangingFile
from keepstep.checkpoint.files.watched import WRITERS_MAX, CopiedSet, Edition
from keepstep.checkpoint.files.writers import check_captured
from keepstep.checkpoint.filing.manifest import (
    FilesManifest,
    StoredFile,
    StoredSet,
    as_object,
    read_files_manifest,
)
from keepstep.checkpoint.keys import (
    ManifestName,
    file_key,
    files_line,
    manifests_prefix,
    objects_prefix,
    parse_file_key,
    parse_manifest_key,
)
from keepstep.checkpoint.receiving import receive
from keepstep.checkpoint.retention import Retention, Swept, delete_if_old, plan_retention
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.core.values import frozen
from keepstep.ports.store import ChecksumMismatch, NotFound, ObjectStore


@frozen
class Kept:
    """A checkpoint of files that is committed (None: there is none), and the bytes that had to be uploaded for it."""

    manifest: FilesManifest | None
    uploaded_bytes: int


@frozen
class _File:
    """A file of a copy as a body to put."""

    fd: int
    size_bytes: int

    def __iter__(self) -> Iterator[bytes]:
        yield from file_chunks(self.fd, 0, self.size_bytes)


@frozen
class _Upload:
    store: ObjectStore
    line: str
    name: ManifestName
    nonce: str
    known: Mapping[tuple[str, StoredFile], StoredFile]
    """What lies in the store already, by folder and what there is to say of the file without its key."""


def newest_files(store: ObjectStore, job: str, without: frozenset[str] = frozenset()) -> FilesManifest | None:
    """The newest committed checkpoint of a script's own files that can be read; None where there is none.

    Raises:
        MalformedDocument: HEAD is not what keepstep wrote.
        StoreError: the store's own.
    """
    line, passed = files_line(job), set(without)
    while True:
        head, _ = newest_checkpoint(store, line, frozenset(passed), read_files_manifest)
        if head is None or not head.manifest:
            return None
        try:
            return read_files_manifest(store, line, head.manifest)
        except (MalformedDocument, NotFound):
            passed.add(head.manifest)


def keep(store: ObjectStore, job: str, edition: Edition, generation: int, run: str, created_unix: int) -> Kept:
    """Upload an edition and commit it, with what is committed already of other writers. What says nothing new is left.

    Of a set whose copy was written to meanwhile (a link, to a file that its script writes over in place), the one that
    is committed already stays.

    Raises:
        Fenced: another generation or run has HEAD.
        StoreError: the store's own.
    """
    line = files_line(job)
    before = newest_files(store, job)
    if not edition.sets:
        return Kept(before, 0)
    names = (parse_manifest_key(line, key) for key in store.list(manifests_prefix(line)))
    number = max((name.step for name in names if name is not None), default=0) + 1
    sets_before = () if before is None else before.sets
    known = {(each.folder, replace(file, key="")): file for each in sets_before for file in each.files}
    upload = _Upload(store, line, ManifestName(generation, number, run), new_nonce(), known)
    uploaded, place, sets = 0, 0, list[StoredSet]()
    for copied in edition.sets:
        try:
            put = _put_all(upload, copied, place)
        except ChangingFile:
            continue
        finally:
            place += len(copied.found.files)
        uploaded += sum(size_bytes for _, size_bytes in put)
        found, files = copied.found, tuple(stored for stored, _ in put)
        sets.append(StoredSet(copied.folder, found.kind, found.name, found.is_named, files))
    if not sets:
        return Kept(before, 0)
    newest = {each.writer: each for each in (*sets_before, *sets)}
    youngest = sorted(newest, key=lambda writer: -newest[writer].mtime_ns)[:WRITERS_MAX]
    whole = tuple(newest[writer] for writer in sorted(youngest))
    manifest = FilesManifest(job, generation, number, run, whole, created_unix)
    head = read_head(store, line).head
    if before is not None and head is not None and head.manifest == before.key and before.digest == manifest.digest:
        if head.generation > generation:
            raise Fenced(f"HEAD of {line} belongs to generation {head.generation}, this is {generation}")
        return Kept(before, uploaded)
    commit(store, manifest)
    return Kept(manifest, uploaded)


def _put_all(upload: _Upload, copied: CopiedSet, place: int) -> list[tuple[StoredFile, int]]:
    """Each file of a set as the store has it, and how many bytes went there.

    Raises:
        ChangingFile: somebody has written to the copy.
    """
    try:
        put = [_put(upload, copied, listed, at) for at, listed in enumerate(copied.found.files, place)]
    except (ChecksumMismatch, ShortSlab):
        check_captured(copied.place, copied.copies)
        raise
    check_captured(copied.place, copied.copies)
    return put


def _put(upload: _Upload, copied: CopiedSet, listed: ListedFile, place: int) -> tuple[StoredFile, int]:
    """The file as the store has it, and how many bytes went there."""
    fd = os.open(copied.place / listed.name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        crc = file_crc32c(fd, 0, listed.size_bytes)
        # a time before 1970 is none that a file can be given anywhere
        file = StoredFile(listed.name, "", listed.size_bytes, f"{crc:08x}", max(0, listed.mtime_ns))
        there = upload.known.get((copied.folder, file))
        if there is not None:
            return there, 0
        key = file_key(upload.line, upload.name, upload.nonce, place, listed.name)
        upload.store.put(key, _File(fd, listed.size_bytes), crc32c=crc)
    finally:
        os.close(fd)
    return replace(file, key=key), listed.size_bytes


def verify_files(store: ObjectStore, manifest: FilesManifest, told: Callable[[int], None]) -> list[str]:
    """Read all files back; what is wrong with them, nothing where they are sound.

    Raises:
        StoreError: the store's own, but for a file that is gone.
    """
    wrong = []
    for file in manifest.files():
        try:
            receive(store, as_object(file), lambda piece, _: told(len(piece)))
        except (CorruptObject, NotFound) as error:
            wrong.append(str(error))
    return wrong


def sweep_files(store: ObjectStore, job: str, generation: int | None, retention: Retention, now_unix: float) -> Swept:
    """Delete what retention lets go of the files: manifests first, then what only those named, then old garbage.

    Args:
        store: where.
        job: whose.
        generation: the caller's, refused where their HEAD has a newer one; None leaves that out.
        retention: what to keep.
        now_unix: the time by which ages are counted.

    Raises:
        Fenced: their HEAD belongs to a newer generation.
        StoreError: the store's own.
        MalformedDocument, NotFound: it is not known what one that is kept names: nothing is deleted then.
    """
    line = files_line(job)
    head = read_head(store, line).head
    if head is not None and generation is not None and head.generation > generation:
        raise Fenced(f"HEAD of the files belongs to generation {head.generation}, this is {generation}")
    committed = None if head is None else parse_manifest_key(line, head.manifest)
    if committed is None:
        return Swept(0, 0, 0)
    names = {name for key in store.list(manifests_prefix(line)) if (name := parse_manifest_key(line, key)) is not None}
    let_go = plan_retention(names, retention.keep_last, retention.keep_every, {committed})
    doomed = {name for name in let_go if name < committed}
    wanted = {key for name in names - doomed for key in _keys(store, line, name)}
    objects: set[str] = set()
    for name in sorted(doomed):
        with contextlib.suppress(MalformedDocument, NotFound):
            objects |= _keys(store, line, name) - wanted
        store.delete(name.key(line))
    for key in objects:
        store.delete(key)
    garbage = [
        key for key in store.list(objects_prefix(line)) if key not in wanted and parse_file_key(line, key) is not None
    ]
    old = sum(delete_if_old(store, key, now_unix - retention.grace_s) for key in garbage)
    return Swept(len(doomed), len(objects) + old, 0)


def _keys(store: ObjectStore, line: str, name: ManifestName) -> set[str]:
    try:
        return {file.key for file in read_files_manifest(store, line, name.key(line)).files()}
    except MalformedDocument as error:
        raise MalformedDocument(f"{name.key(line)}: {error}") from error
