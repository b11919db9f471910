"""Text files that somebody else wrote, read within limits."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path

from keepstep.errors import ConfigError

_SHOWN_MAX = 60
_PRINTED_MAX = 250


def read_text(path: Path, bytes_max: int, what: str) -> str | None:
    """Read a whole text file; None where there is none.

    Raises:
        ConfigError: it is no plain file, too large, unreadable, or not UTF-8.
    """
    name = printable(str(path))
    try:
        kind = path.stat()
        if not stat.S_ISREG(kind.st_mode):
            found = "a directory" if stat.S_ISDIR(kind.st_mode) else "no plain file"
            raise ConfigError(f"it is {found}", what, file=name)
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"it can not be read: {reason}", f"{what} that can be read", file=name) from None
    if len(data) > bytes_max:
        raise ConfigError(f"the file has more than {bytes_max} bytes", f"{what} of at most that", file=name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise ConfigError(found, f"{what} in UTF-8", file=name, line=line) from None


def can_be_given(value: object) -> bool:
    """Whether a process and a journal can be given all the text in a value: no NUL, no half of a surrogate pair."""
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, Mapping):
        return all(can_be_given(key) and can_be_given(part) for key, part in value.items())
    return all(map(can_be_given, value)) if isinstance(value, list | tuple) else True


def printable(text: str) -> str:
    """Somebody else's words for a message of one line: escaped where they do not print, cut where they are long."""
    shown = text if text.isprintable() else json.dumps(text)[1:-1]
    return shown if len(shown) <= _PRINTED_MAX else f"{shown[:_PRINTED_MAX]}…"


def show(value: object) -> str:
    """A value for an error message: as JSON, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
