"""Manifest of a script's own files, version 1: which files make the checkpoint, and where each of them lies.

Canonical JSON with its own SHA-256, never changed once written. HEAD is that of `keepstep.checkpoint.manifest`, with
the number of the commit in the place of the step.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import PurePosixPath

from keepstep.checkpoint.digests import crc32c, format_digest, is_digest
from keepstep.checkpoint.files.sets import FileSet, Kind, family_of
from keepstep.checkpoint.keys import ManifestName, files_line, is_job, is_run, parse_file_key
from keepstep.checkpoint.manifest import LOCAL, MANIFEST_BYTES_MAX, StoredObject
from keepstep.checkpoint.strict_json import (
    MalformedDocument,
    check_object,
    parse_object,
    parse_version,
    write_canonical,
)
from keepstep.core.values import frozen
from keepstep.ports.store import ObjectStore

VERSION = 1
_CRC = re.compile(r"[0-9a-f]{8}")
_FILE_FIELDS = {"name": str, "key": str, "size_bytes": int, "crc32c": str, "mtime_ns": int}
_SET_FIELDS = {"folder": str, "kind": str, "name": str, "is_named": bool, "files": list}
_FIELDS = {
    "version": int, "owner": str, "generation": int, "step": int, "run": str, "sets": list, "created_unix": int,
    "sha256": str,
}  # fmt: skip


@frozen
class StoredFile:
    """One file; `mtime_ns` is when the script wrote it, and is given back to it."""

    name: str
    key: str
    size_bytes: int
    crc32c: str
    mtime_ns: int


@frozen
class StoredSet:
    """Files that make a checkpoint together.

    Attributes:
        folder: where the script wrote it, below the folder that is watched; empty for that one itself.
        kind: the files' form.
        name: TensorFlow's prefix, or the name of the first file.
        is_named: the folder's `checkpoint` file named it.
        files: in the order in which they were written.
    """

    folder: str
    kind: Kind
    name: str
    is_named: bool
    files: tuple[StoredFile, ...]

    @property
    def writer(self) -> tuple[str, Kind, str]:
        """What the sets of one writer have in common, as in `keepstep.checkpoint.files.watched`."""
        return self.folder, *family_of(FileSet(self.kind, self.name, ()))

    @property
    def mtime_ns(self) -> int:
        """When the script last wrote to it."""
        return max(file.mtime_ns for file in self.files)

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


@frozen
class FilesManifest:
    """The newest whole set of each writer, at one time.

    Attributes:
        owner: the job.
        step: the commit's number, from 1.
        created_unix: whole seconds, by the committing host's clock.
    """

    owner: str
    generation: int
    step: int
    run: str
    sets: tuple[StoredSet, ...]
    created_unix: int

    @property
    def job(self) -> str:
        """The job's line of files: what its keys begin with."""
        return files_line(self.owner)

    @property
    def name(self) -> ManifestName:
        return ManifestName(self.generation, self.step, self.run)

    @property
    def key(self) -> str:
        return self.name.key(self.job)

    @property
    def digest(self) -> str:
        """Equal for equal files, written at the same times, wherever they lie in the store."""
        said = [
            [each.label, each.is_named, [[f.name, f.size_bytes, f.crc32c, f.mtime_ns] for f in each.files]]
            for each in self.sets
        ]
        return format_digest(crc32c(write_canonical({"sets": said})))

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files())

    def files(self) -> Iterator[StoredFile]:
        """All files of all sets."""
        for each in self.sets:
            yield from each.files

    def has(self, folder: str, found: FileSet) -> bool:
        """Whether a set that was listed in a folder is one of these, as far as names, sizes and times tell."""
        listed = {(file.name, file.size_bytes, file.mtime_ns) for file in found.files}
        return any(
            (each.folder, each.kind, each.name) == (folder, found.kind, found.name)
            and {(file.name, file.size_bytes, file.mtime_ns) for file in each.files} == listed
            for each in self.sets
        )

    def says_the_same(self, there: bytes) -> bool:
        """As `keepstep.checkpoint.commit.Committable`."""
        return parse_files_manifest(there) == self

    def to_bytes(self) -> bytes:
        """The document as the store keeps it."""
        document: dict[str, object] = {"version": VERSION, **asdict(self)}
        return write_canonical({**document, "sha256": hashlib.sha256(write_canonical(document)).hexdigest()})


def as_object(file: StoredFile) -> StoredObject:
    """What there is to know for reading it."""
    return StoredObject(file.key, LOCAL, 0, 0, file.size_bytes, file.crc32c)


def parse_files_manifest(data: bytes) -> FilesManifest:
    """Read a manifest, strictly.

    Raises:
        MalformedDocument: another version, or any deviation from version 1.
    """
    what = "manifest of files"
    parse_version(data, what, VERSION)
    fields = parse_object(data, what, _FIELDS)
    sets = tuple(_parse_set(entry, f"{what}: sets[{i}]") for i, entry in enumerate(fields["sets"]))
    values = {name: fields[name] for name in _FIELDS if name not in ("version", "sets", "sha256")}
    manifest = FilesManifest(sets=sets, **values)
    if manifest.to_bytes() != data:
        raise MalformedDocument(f"{what}: the bytes are not those that its sha256 was made of")
    _check(manifest, what)
    return manifest


def read_files_manifest(store: ObjectStore, line: str, key: str) -> FilesManifest:
    """Read the manifest of that key.

    Raises:
        MalformedDocument: it is none, or the one of another key.
        NotFound: it is gone.
    """
    manifest = parse_files_manifest(store.read(key, MANIFEST_BYTES_MAX))
    if (manifest.job, manifest.key) != (line, key):
        raise MalformedDocument(f"{key} holds the manifest {manifest.key}")
    return manifest


def _parse_set(entry: object, what: str) -> StoredSet:
    fields = check_object(entry, what, _SET_FIELDS)
    files = tuple(
        StoredFile(**check_object(file, f"{what}: files[{i}]", _FILE_FIELDS)) for i, file in enumerate(fields["files"])
    )
    if fields["kind"] not in set(Kind):
        raise MalformedDocument(f"{what}: kind {fields['kind']!r} is none of {', '.join(Kind)}")
    return StoredSet(**{**fields, "kind": Kind(fields["kind"]), "files": files})


def _check(manifest: FilesManifest, what: str) -> None:
    if not is_job(manifest.owner) or not is_run(manifest.run) or manifest.step < 1 or not manifest.sets:
        raise MalformedDocument(f"{what}: owner, run, number or sets are malformed")
    assert is_digest(manifest.digest)
    paths = [(each.folder, file.name) for each in manifest.sets for file in each.files]
    if len(set(paths)) != len(paths):
        raise MalformedDocument(f"{what}: a file stands there twice")
    for folder, name in paths:  # what is written by these names must stay below the folder that is watched
        parts = PurePosixPath(folder).parts if folder else ()
        inside = not folder.startswith("/") and ".." not in parts and folder == "/".join(parts)
        if not inside or not name or "/" in name or name in (".", "..") or "\0" in f"{folder}{name}":
            raise MalformedDocument(f"{what}: {folder!r} and {name!r} are no place below a folder")
    for each in manifest.sets:
        if not each.files:
            raise MalformedDocument(f"{what}: {each.label} has no files")
    for file in manifest.files():
        if parse_file_key(manifest.job, file.key) is None or not _CRC.fullmatch(file.crc32c):
            raise MalformedDocument(f"{what}: key or crc32c of {file.name} is malformed")
