"""The platform's JSON files, read within limits and with errors that name file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.files import can_be_given, printable, read_text, show

DOCUMENT_BYTES_MAX = 1 << 20
DEPTH_MAX = 64


@frozen
class Document:
    """A JSON object, and the text that it was read from."""

    file: str
    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def error(self, key: str, found: str, wanted: str) -> ConfigError:
        """An error about one key of this file."""
        return ConfigError(found, wanted, file=self.file, line=self.line_of(key), key=printable(key))

    def check(self, key: str, value: object) -> None:
        """Refuse what could not be passed on to the script.

        Raises:
            ConfigError: it is nested too deep, or holds text that no process can be given.
        """
        if _is_deeper(value, DEPTH_MAX):
            raise self.error(key, f"found more than {DEPTH_MAX} levels", "fewer levels")
        if not can_be_given(key) or not can_be_given(value):
            raise self.error(key, "found a NUL or half a surrogate pair", "text that a process can be given")

    def line_of(self, key: str) -> int | None:
        """The first line on which the key stands; None where it does not."""
        match = re.search(re.escape(json.dumps(key)) + r"\s*:", self.text)
        return None if match is None else self.text.count("\n", 0, match.start()) + 1


def read_document(path: Path) -> Document | None:
    """Read a JSON object; None where there is no such file.

    Raises:
        ConfigError: it can not be read, is too large, or is no JSON object.
    """
    text = read_text(path, DOCUMENT_BYTES_MAX, "a JSON file")
    return None if text is None else parse_document(text, printable(str(path)))


def parse_document(text: str, file: str) -> Document:
    """Parse a JSON object.

    Raises:
        ConfigError: it is none, a key stands there twice, or something in it can not be passed on.
    """
    if not text.strip():
        raise ConfigError("the file is empty", "a JSON object", file=file)
    try:
        values = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        what = "ends in mid-value" if error.pos >= len(text.rstrip()) else f"{error.msg}, column {error.colno}"
        raise ConfigError(f"malformed JSON: {what}", "a JSON object", file=file, line=error.lineno) from None
    except _Repeated as error:
        document = Document(file, text)
        raise document.error(str(error), "the key stands there twice", "each key once") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"malformed JSON: {error}", "a JSON object", file=file) from None
    if not isinstance(values, dict):
        raise ConfigError(f"found {show(values)}", "a JSON object", file=file, line=1)
    document = Document(file, text, values)
    for key, value in values.items():
        document.check(key, value)
    return document


def _is_deeper(value: object, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is not None and (levels == 0 or any(_is_deeper(part, levels - 1) for part in parts))


class _Repeated(Exception):
    """A key stands in one object twice."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Repeated(key)
        found[key] = value
    return found
