"""What knobs of a policy are made of: their fields and sections, and the text of those that are more than a word."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from keepstep.core.quantities import show_seconds

STORE = "a directory, s3://bucket/prefix, or none"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[^\0]*)?", re.ASCII)
_ENDPOINT = re.compile(r"https?://(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(\d{1,5})", re.ASCII)
_LISTEN = re.compile(r"(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(\d{1,5})", re.ASCII)
PORT_MAX = 65_535


def parse_store(value: object) -> str:
    """A store's name, checked as far as that goes without asking it.

    Raises:
        ValueError: it can be no store.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(STORE)
    if "://" in value and _BUCKET.fullmatch(value) is None:
        raise ValueError(STORE)
    return value


def parse_encryption(value: str) -> str:
    """Who encrypts, as far as that can be told from the name.

    Raises:
        ValueError: it names nothing.
    """
    if not value.strip() or any(letter.isspace() or ord(letter) < ord(" ") for letter in value):
        raise ValueError("bucket, kms, or a KMS key's id, ARN or alias")
    return value


def parse_endpoint(value: str) -> str:
    """An etcd's URL, with its port.

    Raises:
        ValueError: it is none.
    """
    match = _ENDPOINT.fullmatch(value)
    if match is None or not 0 < int(match[1]) <= PORT_MAX:
        raise ValueError("embedded, or a list of URLs as http://10.0.0.1:2379")
    return value


def parse_listen(value: str) -> str:
    """Where to listen.

    Raises:
        ValueError: it is no host:port.
    """
    match = _LISTEN.fullmatch(value)
    if match is None or int(match[1]) > PORT_MAX:
        raise ValueError("host:port, as 127.0.0.1:9404; port 0 takes any free one")
    return value


def knob(default: Any, text: str, *, unit: str, failure: str, **limits: Any) -> Any:
    """A field with what `policy explain` shows: its unit, its range and the failure it is for."""
    extra: dict[str, Any] = {"unit": unit, "failure": failure}
    if "range" in limits:
        extra["range"] = limits.pop("range")
    if "ge" in limits:
        low, high = limits["ge"], limits["le"]
        show = show_seconds if unit == "duration" else str
        extra["range"] = f"{show(low)} to {show(high)}"
    return Field(default, description=text, json_schema_extra=extra, **limits)


class Section(BaseModel):
    """Some knobs; what is unknown is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
