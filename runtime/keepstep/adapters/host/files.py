"""Small files of the kernel's: a line, a number, a table. What is not there says nothing."""

from __future__ import annotations

import os
from pathlib import Path


def text_of(path: Path) -> str:
    """What stands in a file, empty where it can not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """The one number in a file."""
    return whole(text_of(path).strip())


def whole(word: str) -> int | None:
    """A number, negative ones included; None where it is none."""
    try:
        return int(word)
    except ValueError:
        return None


def table_of(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as `memory.stat` and `cpu.stat` have them; a colon may follow the name."""
    found = {}
    for line in text_of(path).splitlines():
        words = line.split()
        number = whole(words[1]) if len(words) > 1 else None
        if number is not None:
            found[words[0].rstrip(":")] = number
    return found


def is_folder(path: Path) -> bool:
    """Whether a folder is there and can be looked at."""
    return os.path.isdir(path)


def entries_of(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing where it is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def numbers_of(text: str) -> frozenset[int]:
    """A list of the kernel's, as `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = whole(first), whole(last or first)
        if low is not None and high is not None:
            found.update(range(low, high + 1))
    return frozenset(found)
