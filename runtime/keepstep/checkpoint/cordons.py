"""The list of what is to take no part in a job: GPUs and machines, an object for each, so that nobody waits for others.

Names of hosts move to other hardware between two runs; what an entry is known by does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from keepstep.checkpoint.keys import cordon_key, cordons_prefix, is_job
from keepstep.checkpoint.strict_json import MalformedDocument, parse_object, write_canonical
from keepstep.core.gpu_events import KeptCordon
from keepstep.ports.store import NotFound, ObjectStore, PreconditionFailed

VERSION = 1
_BYTES_MAX = 64 << 10
_FIELDS = {"version": int, "what": str, "host": str, "by": str, "why": str, "at": float}


def read_cordons(store: ObjectStore, job: str) -> list[KeptCordon]:
    """All entries, the oldest first; one that keepstep did not write is passed over.

    Raises:
        StoreError: the store does not answer.
    """
    found = []
    for key in store.list(cordons_prefix(job)):
        try:
            found.append(parse_cordon(store.read(key, _BYTES_MAX), key))
        except (NotFound, MalformedDocument):  # lifted meanwhile, or no entry
            continue
    return sorted(found, key=lambda entry: (entry.at, entry.what))


def cordoned_jobs(store: ObjectStore) -> tuple[str, ...]:
    """The jobs that have such a list in a store, by name."""
    parts = [key.split("/") for key in store.list("")]
    return tuple(sorted({job for job, *below in parts if is_job(job) and below[:1] == ["cordons"]}))


def parse_cordon(data: bytes, key: str) -> KeptCordon:
    """The entry behind an object's bytes.

    Raises:
        MalformedDocument: it is none of this version.
    """
    document = parse_object(data, key, _FIELDS)
    if document.pop("version") != VERSION:
        raise MalformedDocument(f"{key}: version {VERSION} is wanted")
    return KeptCordon(**document)


def keep_cordon(store: ObjectStore, job: str, entry: KeptCordon) -> bool:
    """Write an entry; False where there is one already, which stays as it is: the first evidence is the best."""
    document = {"version": VERSION, **asdict(entry), "at": float(entry.at)}
    try:
        store.put(cordon_key(job, entry.what), write_canonical(document), if_absent=True)
    except PreconditionFailed:
        return False
    return True


def lift_cordons(store: ObjectStore, job: str, lifted: Iterable[str]) -> None:
    """Remove the entries of these; what has none is fine."""
    for what in lifted:
        store.delete(cordon_key(job, what))
