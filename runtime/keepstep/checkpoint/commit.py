"""When a checkpoint exists: claim HEAD for the generation, write the manifest if absent, swap HEAD.

A store has no transaction over two keys. So the manifest is written first, under a name nobody else writes to, and HEAD
names it in one compare-and-swap. A generation that lost its claim finds another one in HEAD and stops; a lost answer
looks like a failed condition (412), and the nonce in HEAD tells the two apart.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from keepstep.checkpoint.keys import head_key, manifests_prefix, parse_manifest_key
from keepstep.checkpoint.manifest import (
    HEAD_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    Head,
    Manifest,
    claim_head,
    parse_head,
    parse_manifest,
)
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.core.values import frozen
from keepstep.ports.store import Conflict, NotFound, ObjectStore, PreconditionFailed

ATTEMPTS = 16
"""Swaps tried against other writers; each one that is lost means that somebody else's succeeded."""


class Committable(Protocol):
    """The document that makes a checkpoint exist."""

    @property
    def job(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def run(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def key(self) -> str: ...

    def to_bytes(self) -> bytes: ...

    def says_the_same(self, there: bytes) -> bool:
        """Whether a document under the same key is of the same checkpoint, whoever wrote it.

        Raises:
            MalformedDocument: it is none.
        """
        ...


class Fenced(Exception):
    """HEAD belongs to a newer generation, or to another run of this one: this one may commit nothing any more."""


class StaleStep(Exception):
    """HEAD holds a later step of this generation already, or another state of this very step."""


@frozen
class Seen:
    """HEAD as it was read, and the etag to swap it by; both None where it is absent."""

    head: Head | None
    etag: str | None


def new_nonce() -> str:
    """A name for one write, never used twice."""
    return uuid.uuid4().hex


def read_head(store: ObjectStore, job: str) -> Seen:
    """Read HEAD. The etag is at most as new as the content, so that a swap by it can not overwrite what was not read.

    Raises:
        MalformedDocument: HEAD is not what keepstep wrote.
    """
    key = head_key(job)
    try:
        etag = store.stat(key).etag
        return Seen(parse_head(store.read(key, HEAD_BYTES_MAX), job), etag)
    except NotFound:
        return Seen(None, None)


def newest_checkpoint(
    store: ObjectStore, job: str, without: frozenset[str], read: ReadManifest | None = None
) -> tuple[Head | None, tuple[str, ...]]:
    """HEAD; where the checkpoint it names is among `without`, HEAD as if the next older one were the newest.

    Args:
        store: where.
        job: whose, or what stands for it.
        without: keys of manifests that are not to be taken.
        read: reads a manifest of this line; as `read_manifest` where it is not given.

    Returns:
        HEAD, and the keys of manifests that were passed over because they can not be read.

    Raises:
        MalformedDocument: HEAD is not what keepstep wrote.
    """
    head = read_head(store, job).head
    newest = None if head is None else parse_manifest_key(job, head.manifest)
    if head is None or newest is None or head.manifest not in without:
        return head, ()
    names = (parse_manifest_key(job, key) for key in store.list(manifests_prefix(job)))
    older = sorted((name for name in names if name is not None and name < newest), reverse=True)
    unreadable: list[str] = []
    for key in (name.key(job) for name in older):
        if key in without:
            continue
        try:
            manifest = (read or read_manifest)(store, job, key)
        except (MalformedDocument, NotFound):
            unreadable.append(key)
            continue
        return replace(head, step=manifest.step, manifest=key, digest=manifest.digest), tuple(unreadable)
    return replace(head, step=0, manifest="", digest=""), tuple(unreadable)


def read_manifest(store: ObjectStore, job: str, key: str) -> Manifest:
    """Read the manifest of that key.

    Raises:
        MalformedDocument: it is none, or the one of another key.
        NotFound: it is gone.
    """
    manifest = parse_manifest(store.read(key, MANIFEST_BYTES_MAX))
    if manifest.job != job or manifest.key != key:
        raise MalformedDocument(f"{key} holds the manifest {manifest.key}")
    return manifest


ReadManifest = Callable[[ObjectStore, str, str], Committable]
"""Reads the manifest of a key, for a job or what stands for it."""


def commit(store: ObjectStore, manifest: Committable, nonce: Callable[[], str] = new_nonce) -> str:
    """Make a checkpoint exist and be the newest; returns its manifest's key. Committing it again changes nothing.

    Raises:
        Fenced: another generation or run has HEAD.
        StaleStep: a later step of this generation is committed already.
        MalformedDocument: HEAD, or a manifest that stands there already, can not be read.
        Conflict: too many others write at the same time.
        StoreError: the store's own.
    """
    _swap_head(store, manifest.job, lambda head: _claimed(head, manifest, nonce()))
    put_manifest(store, manifest)
    _swap_head(store, manifest.job, lambda head: _advanced(head, manifest, nonce()))
    return manifest.key


def claim(store: ObjectStore, job: str, generation: int, run: str, nonce: Callable[[], str] = new_nonce) -> None:
    """Have HEAD carry this generation, so that older ones commit nothing any more; not where it carries a newer one.

    Raises:
        MalformedDocument: HEAD can not be read.
        Conflict: too many others write at the same time.
        StoreError: the store's own.
    """

    def claimed(head: Head | None) -> Head | None:
        if head is not None and head.generation >= generation:
            return None
        return claim_head(head, generation, run, nonce())

    _swap_head(store, job, claimed)


def _swap_head(store: ObjectStore, job: str, change: Callable[[Head | None], Head | None]) -> None:
    """Replace HEAD by what `change` makes of it (None: it is well as it is), whoever else writes meanwhile."""
    for _ in range(ATTEMPTS):
        seen = read_head(store, job)
        wanted = change(seen.head)
        if wanted is None:
            return
        try:
            store.put(head_key(job), wanted.to_bytes(), if_absent=seen.etag is None, if_match=seen.etag)
            return
        except (PreconditionFailed, Conflict):
            after = read_head(store, job).head
            if after is not None and after.nonce == wanted.nonce:
                return
    raise Conflict(f"HEAD of {job} changed {ATTEMPTS} times while it was to be swapped")


def _refuse(head: Head | None, manifest: Committable) -> None:
    if head is None or head.generation < manifest.generation:
        return
    if head.generation > manifest.generation:
        raise Fenced(f"HEAD belongs to generation {head.generation}, this is {manifest.generation}")
    if head.run != manifest.run:
        raise Fenced(f"HEAD's generation {head.generation} belongs to run {head.run}, this is {manifest.run}")
    newest = parse_manifest_key(manifest.job, head.manifest)
    if newest is not None and newest.generation == manifest.generation and newest.step > manifest.step:
        raise StaleStep(f"step {newest.step} is committed, {manifest.step} comes too late")


def _claimed(head: Head | None, manifest: Committable, nonce: str) -> Head | None:
    _refuse(head, manifest)
    if head is not None and head.generation == manifest.generation:
        return None
    return claim_head(head, manifest.generation, manifest.run, nonce)


def _advanced(head: Head | None, manifest: Committable, nonce: str) -> Head | None:
    _refuse(head, manifest)
    if head is not None and head.manifest == manifest.key and head.generation == manifest.generation:
        return None
    return Head(manifest.generation, manifest.step, manifest.key, manifest.digest, manifest.run, nonce)


def put_manifest(store: ObjectStore, manifest: Committable) -> None:
    """Write a manifest, whether or not HEAD will name it.

    Raises:
        StaleStep: another one stands there already.
        Conflict: it comes and goes.
        StoreError: the store's own.
    """
    for _ in range(ATTEMPTS):
        try:
            store.put(manifest.key, manifest.to_bytes(), if_absent=True)
            return
        except PreconditionFailed:
            pass
        try:
            there = store.read(manifest.key, MANIFEST_BYTES_MAX)
        except NotFound:
            continue
        if not manifest.says_the_same(there):
            raise StaleStep(f"{manifest.key} stands already, of another state than {manifest.digest}")
        return
    raise Conflict(f"{manifest.key} came and went {ATTEMPTS} times")
