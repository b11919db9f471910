"""Whether a store keeps the promises that commits rest on, found out before anything rests on them."""

from __future__ import annotations

import contextlib

from keepstep.checkpoint.keys import probe_prefix
from keepstep.ports.store import ObjectStore, PreconditionFailed, StoreRefused

_FIRST, _SECOND = b"first\n", b"second\n"


def probe_store(store: ObjectStore, job: str, nonce: str) -> None:
    """Write, read, compare-and-swap and delete one small object.

    Raises:
        StoreRefused: something is not permitted, or the store ignores conditions (some do, and answer 200): two
            generations could then both commit.
        StoreUnavailable: no answer.
    """
    key = f"{probe_prefix(job)}{nonce}"
    with contextlib.suppress(PreconditionFailed):  # by our own first attempt, where its answer was lost
        store.put(key, _FIRST, if_absent=True)
    try:
        _expect_refusal(store, key, None, "If-None-Match: *")
        _expect_refusal(store, key, '"00000000000000000000000000000000"', "If-Match")
        if store.read(key, 64) != _FIRST:
            raise StoreRefused("the store gives back other bytes than it was given")
        try:
            store.put(key, _SECOND, if_match=store.stat(key).etag)
        except PreconditionFailed:
            if store.read(key, 64) != _SECOND:
                raise StoreRefused("the store refuses a write whose If-Match holds") from None
        if key not in store.list(probe_prefix(job)):
            raise StoreRefused("the store does not list what was just written to it")
    finally:
        store.delete(key)


def _expect_refusal(store: ObjectStore, key: str, if_match: str | None, header: str) -> None:
    try:
        store.put(key, b"never\n", if_absent=if_match is None, if_match=if_match)
    except PreconditionFailed:
        return
    raise StoreRefused(f"the store ignores {header}: commits would not be safe in it")
