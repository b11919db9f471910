"""JSON of which every byte is accounted for: exact keys, exact types, no repeats; and the one way to write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class MalformedDocument(Exception):
    """A document in the store is not what its name says; the message names document and place."""


def write_canonical(document: Mapping[str, object]) -> bytes:
    """The bytes of a document: keys sorted, no spaces, a newline at the end. Equal documents are equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parse_object(data: bytes, what: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """A JSON object that has exactly these fields, each of exactly this type (a bool is no int).

    Raises:
        MalformedDocument: it is anything else.
    """
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedDocument(f"{what}: {error}") from None
    return check_object(document, what, fields)


def check_object(document: object, what: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """The same for a value that is parsed already."""
    if not isinstance(document, dict):
        raise MalformedDocument(f"{what}: an object is wanted, not {type(document).__name__}")
    if set(document) != set(fields):
        missing, unknown = sorted(set(fields) - set(document)), sorted(set(document) - set(fields))
        raise MalformedDocument(f"{what}: missing {missing}, unknown {unknown}")
    for name, kind in fields.items():
        if type(document[name]) is not kind:
            raise MalformedDocument(f"{what}: {name} must be {kind.__name__}, not {type(document[name]).__name__}")
        if kind is int and document[name] < 0:
            raise MalformedDocument(f"{what}: {name} must not be negative")
    return document


def parse_version(data: bytes, what: str, version: int) -> None:
    """Refuse a document of another version before anything else is said about it.

    Raises:
        MalformedDocument: no object, or another version.
    """
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MalformedDocument(f"{what}: {error}") from None
    found = document.get("version") if isinstance(document, dict) else None
    if type(found) is not int or found != version:
        raise MalformedDocument(f"{what}: version {version} is wanted, not {found!r}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")
