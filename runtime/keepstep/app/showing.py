"""What commands show to people: tables, sizes, dates, and a bar for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Lock

_BAR = 30


@contextmanager
def progress(what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error, nothing elsewhere; told of bytes, by any thread."""
    lock, done, shown = Lock(), 0, -1

    def told(more: int) -> None:
        nonlocal done, shown
        with lock:
            done += more
            filled = _BAR * done // max(size_bytes, 1)
            if filled != shown and sys.stderr.isatty():
                shown = filled
                bar = "#" * filled + "." * (_BAR - filled)
                print(f"\r{what} [{bar}] {size(done)} of {size(size_bytes)}", end="", file=sys.stderr, flush=True)

    try:
        yield told
    finally:
        if shown >= 0:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def counter(what: str, things: str) -> Iterator[Callable[[], None]]:
    """A count on a terminal's standard error, of what nobody knows beforehand how much there is; nothing elsewhere."""
    done = 0

    def told() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{what} {done} {things}", end="", file=sys.stderr, flush=True)

    try:
        yield told
    finally:
        if done and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its columns as wide as they must be."""
    whole = [head, *rows]
    widths = [max(len(row[at]) for row in whole) for at in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in whole
    )


def cell(value: object) -> str:
    """A value in a table: `-` where there is none, a list in words."""
    if isinstance(value, list):
        return " ".join(value)
    return "-" if value is None else str(value)


def size(size_bytes: object) -> str:
    """Bytes for people, in powers of ten."""
    if not isinstance(size_bytes, int):
        return "-"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


def date(unix: int) -> str:
    """Seconds since 1970 as a date in UTC."""
    try:
        return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # of a year that has five digits, as a broken clock gives it
        return f"{unix} s"


def standing(row: Mapping[str, object]) -> str:
    """What a list says of a checkpoint: whether it is the newest, and what is wrong with it."""
    return ", ".join(text for text in ("newest" if row["newest"] else "", str(row["trouble"])) if text)


def told_of_head(trouble: str) -> int:
    """Say what is wrong with HEAD; returns 1 where something is."""
    if trouble:
        print(f"HEAD: {trouble}")
    return 1 if trouble else 0


def told_of_unread(label: str, trouble: str) -> int:
    """Say that a checkpoint is not copied, since its manifest can not be read; returns 1."""
    print(f"keepstep: {label}: not copied: {trouble}", file=sys.stderr)
    return 1
