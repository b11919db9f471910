"""Manifest and HEAD, version 1: what makes a set of objects a checkpoint, and which checkpoint is the newest.

Both are canonical JSON (sorted keys, no spaces). A manifest is never changed once written and carries its own SHA-256;
HEAD is replaced by compare-and-swap and carries a nonce, by which a writer whose answer was lost knows its own hand.
Golden files in the tests hold the formats; a change of either makes a new version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, replace

from keepstep.checkpoint.digests import combine_crc32c, format_digest, is_digest
from keepstep.checkpoint.keys import ManifestName, is_job, is_run, parse_manifest_key, parse_object_key
from keepstep.checkpoint.strict_json import (
    MalformedDocument,
    check_object,
    parse_object,
    parse_version,
    write_canonical,
)
from keepstep.core.values import frozen

VERSION = 1
MANIFEST_BYTES_MAX = 64 << 20
HEAD_BYTES_MAX = 64 << 10
REPLICATED, LOCAL = "replicated", "local"
_CRC = re.compile(r"[0-9a-f]{8}")
_OBJECT_FIELDS = {"key": str, "kind": str, "rank": int, "offset": int, "size_bytes": int, "crc32c": str}
_MANIFEST_FIELDS = {
    "version": int, "job": str, "generation": int, "step": int, "run": str, "world_size": int, "digest": str,
    "replicated_bytes": int, "objects": list, "created_unix": int, "sha256": str,
}  # fmt: skip
_HEAD_FIELDS = {
    "version": int, "generation": int, "step": int, "manifest": str, "digest": str, "run": str, "nonce": str,
}  # fmt: skip


@frozen
class StoredObject:
    """One object of a checkpoint.

    Attributes:
        key: its key in the store.
        kind: `replicated` (a range of what all ranks hold alike) or `local` (a slab's head and its local region).
        rank: the rank that uploaded it.
        offset: where the range begins within the replicated region; 0 for a local one.
        size_bytes: length of the object.
        crc32c: of the object, eight hexadecimal digits.
    """

    key: str
    kind: str
    rank: int
    offset: int
    size_bytes: int
    crc32c: str


@frozen
class Manifest:
    """A checkpoint: one completed step of all ranks, whole.

    Attributes:
        objects: the replicated ranges in rank order, then the local ones in rank order.
        digest: of the replicated region, the same on all ranks.
        created_unix: whole seconds, by the committing host's clock.
    """

    job: str
    generation: int
    step: int
    run: str
    world_size: int
    digest: str
    replicated_bytes: int
    objects: tuple[StoredObject, ...]
    created_unix: int

    @property
    def name(self) -> ManifestName:
        return ManifestName(self.generation, self.step, self.run)

    @property
    def key(self) -> str:
        return self.name.key(self.job)

    def replicated(self) -> tuple[StoredObject, ...]:
        """The ranges of the replicated region, in order."""
        return self.objects[: self.world_size]

    def local(self, rank: int) -> StoredObject:
        """What belonged to `rank`, one of the world's, alone."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a world of {self.world_size}")
        return self.objects[self.world_size + rank]

    def says_the_same(self, there: bytes) -> bool:
        """Whether a document under the same key is of the same checkpoint, whoever wrote it.

        Raises:
            MalformedDocument: it is none.
        """
        other = parse_manifest(there)
        return (other.job, other.key, other.digest, other.world_size) == (
            self.job, self.key, self.digest, self.world_size
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """The document as the store keeps it."""
        document: dict[str, object] = {"version": VERSION, **asdict(self)}
        return write_canonical({**document, "sha256": hashlib.sha256(write_canonical(document)).hexdigest()})


@frozen
class Head:
    """The newest committed checkpoint, and the generation and run that alone may commit the next one.

    `step` is 0 and `manifest` and `digest` are empty while nothing is committed.
    """

    generation: int
    step: int
    manifest: str
    digest: str
    run: str
    nonce: str

    def to_bytes(self) -> bytes:
        """The document as the store keeps it."""
        return write_canonical({"version": VERSION, **asdict(self)})


def build_manifest(
    job: str, name: ManifestName, world_size: int, digest: str, objects: Sequence[StoredObject], created_unix: int
) -> Manifest:
    """Make the manifest of what the ranks report to have uploaded, in whatever order they did.

    Raises:
        MalformedDocument: a share is missing, or the shares do not make up what `digest` was made of.
    """
    ordered = tuple(sorted(objects, key=lambda stored: (stored.kind != REPLICATED, stored.rank)))
    size = sum(stored.size_bytes for stored in ordered if stored.kind == REPLICATED)
    manifest = Manifest(job, name.generation, name.step, name.run, world_size, digest, size, ordered, created_unix)
    _check(manifest, "manifest")
    made_up = format_digest(combine_crc32c((int(o.crc32c, 16), o.size_bytes) for o in manifest.replicated()))
    if made_up != digest:
        raise MalformedDocument(f"manifest: the shares make up {made_up}, the ranks agreed on {digest}")
    return manifest


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest, strictly.

    Raises:
        MalformedDocument: another version, or any deviation from version 1.
    """
    what = "manifest"
    parse_version(data, what, VERSION)
    fields = parse_object(data, what, _MANIFEST_FIELDS)
    objects = tuple(parse_stored_object(entry, f"{what}: objects[{i}]") for i, entry in enumerate(fields["objects"]))
    said = fields["sha256"]
    values = {name: fields[name] for name in _MANIFEST_FIELDS if name not in ("version", "objects", "sha256")}
    manifest = Manifest(objects=objects, **values)
    if manifest.to_bytes() != data:
        raise MalformedDocument(f"{what}: the bytes are not those that its sha256 {said[:64]!r} was made of")
    _check(manifest, what)
    return manifest


def parse_stored_object(entry: object, what: str) -> StoredObject:
    """Read one entry of a manifest's list, or of a report.

    Raises:
        MalformedDocument: fields are missing, unknown or of a wrong type.
    """
    return StoredObject(**check_object(entry, what, _OBJECT_FIELDS))


def parse_head(data: bytes, job: str) -> Head:
    """Read HEAD, strictly.

    Raises:
        MalformedDocument: another version, or any deviation from version 1.
    """
    what = "HEAD"
    parse_version(data, what, VERSION)
    fields = parse_object(data, what, _HEAD_FIELDS)
    head = Head(**{name: value for name, value in fields.items() if name != "version"})
    if not is_run(head.run) or not is_run(head.nonce):
        raise MalformedDocument(f"{what}: run and nonce must be letters and digits")
    if (head.manifest, head.digest, head.step) == ("", "", 0):
        return head
    name = parse_manifest_key(job, head.manifest)
    if name is None or name.step != head.step or name.generation > head.generation or not is_digest(head.digest):
        raise MalformedDocument(f"{what}: step {head.step}, digest and manifest {head.manifest!r} do not go together")
    return head


def claim_head(head: Head | None, generation: int, run: str, nonce: str) -> Head:
    """HEAD after `generation` made itself the only one that may commit; what is committed stays."""
    if head is None:
        return Head(generation, 0, "", "", run, nonce)
    return replace(head, generation=generation, run=run, nonce=nonce)


def _check(manifest: Manifest, what: str) -> None:
    if not is_job(manifest.job) or not is_run(manifest.run) or not is_digest(manifest.digest):
        raise MalformedDocument(f"{what}: job, run or digest is malformed")
    if manifest.world_size < 1 or len(manifest.objects) != 2 * manifest.world_size:
        raise MalformedDocument(f"{what}: {len(manifest.objects)} objects for {manifest.world_size} ranks")
    if manifest.generation < 0 or manifest.step < 1:
        raise MalformedDocument(f"{what}: step {manifest.step} of generation {manifest.generation} can not be")
    offset = 0
    for place, stored in enumerate(manifest.objects):
        kind, rank = (REPLICATED, place) if place < manifest.world_size else (LOCAL, place - manifest.world_size)
        if (stored.kind, stored.rank) != (kind, rank):
            raise MalformedDocument(f"{what}: {stored.key} stands where the {kind} one of rank {rank} belongs")
        if parse_object_key(manifest.job, stored.key) != (manifest.generation, manifest.step):
            raise MalformedDocument(f"{what}: {stored.key} is no object of this checkpoint")
        if not _CRC.fullmatch(stored.crc32c) or stored.size_bytes < 0:
            raise MalformedDocument(f"{what}: size or crc32c of {stored.key} is malformed")
        if stored.offset != (offset if kind == REPLICATED else 0):
            raise MalformedDocument(f"{what}: {stored.key} begins at {stored.offset}: a hole or an overlap")
        offset += stored.size_bytes if kind == REPLICATED else 0
    if offset != manifest.replicated_bytes:
        raise MalformedDocument(f"{what}: the shares hold {offset} bytes of {manifest.replicated_bytes}")
