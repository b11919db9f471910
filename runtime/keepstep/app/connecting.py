"""A store by its name, and what a policy says of how it is written to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.adapters import clock
from keepstep.app.giving import InvalidCommand
from keepstep.checkpoint.throttle import Throttle
from keepstep.ports.store import ObjectStore, StoreRefused

_KINDS = {"encryption": str, "parts_in_flight": int, "bytes_per_s": float | None}


def connect_store(url: str, endpoint: str | None = None, settings: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store that a policy names: `s3://bucket/prefix`, or the path of a directory.

    Args:
        url: its name.
        endpoint: of an S3 that is not Amazon's.
        settings: of S3, each as the policy has it, as far as one is named: `encryption`, `parts_in_flight`, and
            `bytes_per_s` or None.

    Raises:
        StoreRefused: it is neither, or can not be had.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        from keepstep.adapters.store_directory import DirectoryStore

        return DirectoryStore(Path(url))
    if scheme == "s3" and rest.partition("/")[0]:
        from keepstep.adapters.s3 import S3Options, S3Store

        bucket, _, prefix = rest.partition("/")
        options = {name: value for name, value in (settings or {}).items() if name != "bytes_per_s"}
        if settings and settings.get("bytes_per_s") is not None:
            options["pace"] = Throttle(settings["bytes_per_s"], clock.monotonic).take
        return S3Store.connect(bucket, prefix, endpoint, S3Options(**options))
    raise StoreRefused(f"{scheme}:// is no store: s3://bucket/prefix or the path of a directory is wanted")


def s3_settings(command: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `open` says of S3; empty where it says nothing.

    Raises:
        InvalidCommand: a setting is missing or of a wrong type.
    """
    found = command.get("s3", {})
    if not isinstance(found, dict) or (found and set(found) != set(_KINDS)):
        raise InvalidCommand(f"s3 must be an object with {', '.join(_KINDS)}")
    if any(not isinstance(value, _KINDS[name]) for name, value in found.items()):
        raise InvalidCommand(f"s3 is {found}")
    return found
