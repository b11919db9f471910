"""The one object of a job in the store that is no checkpoint: the authority by which its hosts know each other.

It is written only if absent, or over the very one that was found unfit, and removed only if it is still the one meant:
so all hosts that read it after a write hold the same.
"""

from __future__ import annotations

from keepstep.ports.store import NotFound, ObjectStore, PreconditionFailed

_BYTES_MAX = 64 << 10


def authority_key(job: str) -> str:
    return f"{job}/trust/authority.json"


def read_authority(store: ObjectStore, job: str) -> tuple[str, str] | None:
    """The document and its etag; None where there is none.

    Raises:
        StoreError: the store does not answer.
    """
    key = authority_key(job)
    try:
        etag = store.stat(key).etag
        while True:
            content = store.read(key, _BYTES_MAX)
            before, etag = etag, store.stat(key).etag
            if before == etag:
                return content.decode(errors="replace"), etag
    except NotFound:
        return None


def put_authority(store: ObjectStore, job: str, document: str, replaces: str | None) -> bool:
    """Write it where there is none, or over the one with the etag `replaces`; False where another host was first.

    A lost answer looks like another host, too: whoever is told False reads what is there.
    """
    try:
        store.put(authority_key(job), document.encode(), if_absent=replaces is None, if_match=replaces)
    except PreconditionFailed:
        return False
    return True


def remove_authority(store: ObjectStore, job: str, etag: str) -> bool:
    """Remove the one with this etag; False where another one is there, or none."""
    try:
        store.delete(authority_key(job), if_match=etag)
    except PreconditionFailed:
        return False
    return True
