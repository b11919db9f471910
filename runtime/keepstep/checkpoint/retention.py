"""Which checkpoints stay, and the removal of what no checkpoint needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from keepstep.checkpoint.commit import Fenced, read_head, read_manifest
from keepstep.checkpoint.keys import (
    ManifestName,
    manifests_prefix,
    objects_prefix,
    parse_manifest_key,
    parse_object_key,
    probe_prefix,
    tensors_key,
)
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.core.values import frozen
from keepstep.ports.store import NotFound, ObjectStore

GRACE_S = 3600.0
"""Longer than any upload takes: what is younger may belong to a checkpoint that is being made."""


@frozen
class Retention:
    """What to keep.

    Attributes:
        keep_last: newest checkpoints to keep, at least 1.
        keep_every: keep each step that this divides, too; 0 for none.
        restoring: keys of manifests that somebody may be reading.
        grace_s: age in seconds from which an object that no checkpoint names is garbage.
    """

    keep_last: int
    keep_every: int = 0
    restoring: frozenset[str] = frozenset()
    grace_s: float = GRACE_S


@frozen
class Swept:
    """How much was removed."""

    manifests: int
    objects: int
    unfinished: int


def plan_retention(
    names: Iterable[ManifestName], keep_last: int, keep_every: int, restoring: Collection[ManifestName]
) -> frozenset[ManifestName]:
    """Checkpoints to delete. Of several for one step, only that of the newest generation counts as "every n-th".

    Raises:
        ValueError: `keep_last` is below 1, or `keep_every` below 0.
    """
    if keep_last < 1 or keep_every < 0:
        raise ValueError(f"keep_last {keep_last}, keep_every {keep_every}")
    newest_first = sorted(set(names), reverse=True)
    kept = {*newest_first[:keep_last], *restoring}
    if keep_every:
        steps: set[int] = set()
        for name in newest_first:
            if name.step % keep_every == 0 and name.step not in steps:
                steps.add(name.step)
                kept.add(name)
    return frozenset(name for name in newest_first if name not in kept)


def sweep(store: ObjectStore, job: str, generation: int | None, retention: Retention, now_unix: float) -> Swept:
    """Delete what retention lets go: a manifest before its objects, so that no checkpoint is ever half there.

    Args:
        store: where.
        job: whose.
        generation: the caller's, refused where HEAD has a newer one; None leaves that out.
        retention: what to keep.
        now_unix: the time by which ages are counted.

    Raises:
        Fenced: HEAD belongs to a newer generation.
        MalformedDocument, NotFound: what HEAD names can not be gone on from: nothing older is deleted then.
        StoreError: the store's own.
    """
    head, old = read_head(store, job).head, now_unix - retention.grace_s
    if head is None:
        return Swept(0, 0, store.discard_unfinished(f"{job}/", old))
    if generation is not None and head.generation > generation:
        raise Fenced(f"HEAD belongs to generation {head.generation}, this is {generation}")
    committed = parse_manifest_key(job, head.manifest)
    if committed is not None:
        read_manifest(store, job, head.manifest)
    names = {name for key in store.list(manifests_prefix(job)) if (name := parse_manifest_key(job, key)) is not None}
    reading = {name for key in retention.restoring if (name := parse_manifest_key(job, key)) is not None}
    held = reading if committed is None else {*reading, committed}
    # A manifest newer than HEAD's may be about to be named by it, or never be.
    line = {name for name in names if committed is not None and name <= committed}
    doomed = plan_retention(line, retention.keep_last, retention.keep_every, held)
    objects = sum(_delete_checkpoint(store, job, name) for name in sorted(doomed))
    alive = {(name.generation, name.step) for name in names - doomed}
    for key in _garbage(store, job, alive, committed):
        objects += delete_if_old(store, key, old)
    return Swept(len(doomed), objects, store.discard_unfinished(f"{job}/", old))


def _delete_checkpoint(store: ObjectStore, job: str, name: ManifestName) -> int:
    key = name.key(job)
    try:
        manifest = read_manifest(store, job, key)
        tables = [tensors_key(job, name, rank) for rank in range(manifest.world_size)]
        objects = [*(stored.key for stored in manifest.objects), *tables]
    except (MalformedDocument, NotFound):
        objects = []  # whatever belonged to it is found as garbage once the grace is over
    store.delete(key)
    for stored in objects:
        store.delete(stored)
    return len(objects)


def _garbage(
    store: ObjectStore, job: str, alive: set[tuple[int, int]], committed: ManifestName | None
) -> Iterator[str]:
    yield from store.list(probe_prefix(job))
    if committed is None:
        return
    newest = (committed.generation, committed.step)
    for key in store.list(objects_prefix(job)):
        place = parse_object_key(job, key)
        if place is not None and place not in alive and place < newest:
            yield key


def delete_if_old(store: ObjectStore, key: str, before_unix: float) -> int:
    """Delete an object that was written before then; returns 1 where it did."""
    try:
        if store.stat(key).modified_unix >= before_unix:
            return 0
    except NotFound:
        return 0
    store.delete(key)
    return 1
