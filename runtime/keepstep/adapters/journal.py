"""The journal on disk: one JSON object a line, written by a thread of its own, so that no turn ever waits for a disk.

{"journal": 1, "job": {...}, "policy": {...}, "started_at": s}        head: all that the first state is made of
{"n": 7, "now": s, "event": {...}, "notes": [[reason, detail], ...], "actions": [name, ...], "digest": "..."}
{"state": {...}, "n": 7}                                              first line after a rotation
{"dropped": 12}                                                       turns that could not be written: a gap
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

VERSION = 1
QUEUE_MAX = 10_000
FILE_BYTES_MAX = 64 << 20
FILES_KEPT = 4


class JournalError(Exception):
    """A journal can not be read; names file and line."""


class JournalWriter:
    """Writes lines in the order of their posting; drops and counts them where the disk does not keep up."""

    def __init__(
        self, path: Path, *, file_bytes_max: int = FILE_BYTES_MAX, on_dropped: Callable[[str], None] | None = None
    ) -> None:
        """Begin a new journal at `path`; one that is there is kept as `path.1`, `path.2`, ...

        Args:
            path: of the newest file.
            file_bytes_max: the size from which on it wants a rotation.
            on_dropped: told why, from any thread, for each turn that is not written.

        Raises:
            OSError: the file can not be made.
        """
        self._path, self._file_bytes_max, self._on_dropped = path, file_bytes_max, on_dropped
        path.parent.mkdir(parents=True, exist_ok=True)
        rotate(path)
        self._file = path.open("ab", buffering=0)
        self._size_bytes = self._written_bytes = 0
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_MAX)
        self._unmarked = self._unwritten = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the file has reached its size and wants a rotation, at the next turn."""
        return self._written_bytes >= self._file_bytes_max

    def post(self, line: Mapping[str, object], *, event: str = "") -> None:
        """Write a line as soon as possible; never waits. `event` is one more value of it, as JSON already."""
        marked = not self._unmarked or self._offer({"dropped": self._unmarked})
        if marked:
            self._unmarked = 0
        if not marked or not self._offer(line, event):
            self._unmarked += 1
            self._drop("the disk does not keep up")

    def begin_file(self, head: list[Mapping[str, object]]) -> None:
        """Rotate: what is posted from now on goes to a new file that begins with `head`."""
        self._written_bytes = 0
        self._offer({"rotate": True})
        for line in head:
            self._offer(line)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for as long as `timeout_s` at the most."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _offer(self, line: Mapping[str, object], event: str = "") -> bool:
        text = json.dumps(line, separators=(",", ":"))
        try:
            self._lines.put_nowait(f'{text[:-1]},"event":{event}}}' if event else text)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if line == '{"rotate":true}':
                self._rotate()
            else:
                self._write(line)
        self._file.close()

    def _write(self, line: str) -> None:
        """Write the whole line or nothing of it, with a mark before it where others are missing."""
        mark = f'{{"dropped":{self._unwritten}}}\n' if self._unwritten else ""
        data = memoryview(f"{mark}{line}\n".encode())
        size_bytes = self._size_bytes + len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:  # a full disk costs the journal, not the training
            with contextlib.suppress(OSError):
                self._file.truncate(self._size_bytes)
            self._unwritten += 1
            self._drop(str(error))
            return
        self._written_bytes += size_bytes - self._size_bytes
        self._size_bytes, self._unwritten = size_bytes, 0

    def _rotate(self) -> None:
        try:
            rotate(self._path)
            file = self._path.open("ab", buffering=0)
        except OSError as error:  # the old file goes on
            self._drop(str(error))
            return
        self._file.close()
        self._file, self._size_bytes = file, 0

    def _drop(self, why: str) -> None:
        if self._on_dropped is not None:
            self._on_dropped(why)


def rotate(path: Path) -> None:
    """Move `path` to `path.1`, `path.1` to `path.2` and so on; the oldest goes."""
    for number in range(FILES_KEPT - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number + 1}"))
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The journal's lines with their numbers. A torn last line, left by a killed agent, ends the journal.

    Raises:
        JournalError: the file can not be read, or a line that is not the last is not JSON.
    """
    try:
        with path.open(encoding="utf-8") as file:
            pending: tuple[int, str] | None = None
            for number, text in enumerate(file, 1):
                if pending is not None:
                    yield pending[0], _parse(path, *pending)
                pending = (number, text)
            if pending is not None and pending[1].endswith("\n"):
                yield pending[0], _parse(path, *pending)
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"{path}: can not be read: {error}") from error


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise JournalError(f"{path}:{number}: not JSON: {error.msg}; wanted one object a line") from error
    if not isinstance(line, dict):
        raise JournalError(f"{path}:{number}: found {type(line).__name__}, wanted an object")
    return line
