"""Which store and which checkpoints a command means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keepstep.app.connecting import connect_store
from keepstep.checkpoint.catalogue import Document, Listed
from keepstep.checkpoint.retrying import RetryingStore
from keepstep.errors import ConfigError
from keepstep.ports.store import ObjectStore

STEP = "newest, a step, or a name as `ls` shows it"


def open_store(url: str, endpoint: str | None, key: str, encryption: str | None = None) -> ObjectStore:
    """The store of that name.

    Args:
        url: its name.
        endpoint: of an S3 that is not Amazon's.
        key: the argument that named it.
        encryption: of what is written to it, as `checkpoint.s3.encryption`; None: as the bucket has it.

    Raises:
        ConfigError: it is to be read, and there is no such directory; or it is none that encrypts.
        StoreRefused: it is no store.
    """
    if encryption is not None and not url.startswith("s3://"):
        raise ConfigError(f"found {encryption} for {url}", "s3://bucket/prefix with it", key="--encryption")
    if "://" not in url and key == "STORE" and not Path(url).is_dir():
        raise ConfigError(f"found {url}, which is no directory", "s3://bucket/prefix or a store's directory", key=key)
    return RetryingStore(connect_store(url, endpoint, {} if encryption is None else {"encryption": encryption}))


def find(listed: Sequence[Listed[Document]], job: str, wanted: str) -> list[Listed[Document]]:
    """The checkpoints that are meant: one, unless all are.

    Raises:
        ConfigError: there is none.
    """
    found = [
        each
        for each in listed
        if wanted == "all" or (wanted == "newest" and each.is_newest) or wanted in (str(each.name.step), each.label)
    ]
    if not found:
        known = ", ".join(each.label for each in listed[:8]) or "none"
        raise ConfigError(f"{job} has no checkpoint {wanted}", f"{STEP}; there are: {known}", key="STEP")
    return found if wanted == "all" else found[:1]
