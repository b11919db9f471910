"""The journal on disk: one JSON object a line, written by a thread of its own, so that no turn ever waits for a disk.

{"journal": 1, "job": {...}, "policy": {...}, "started_at": s}        head: all that the first state is made of
{"n": 7, "now": s, "event": {...}, "notes": [[reason, detail], ...], "actions": [name, ...], "digest": "..."}
{"state": {...}, "n": 7}                                              first line after a rotation
{"dropped": 12}                                                       turns that could not be written: a gap
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping
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

    def __init__(self, path: Path, *, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        """Begin a new journal at `path`; one that is there is kept as `path.1`, `path.2`, ...

        Raises:
            OSError: the file can not be made.
        """
        self._path, self._file_bytes_max = path, file_bytes_max
        path.parent.mkdir(parents=True, exist_ok=True)
        rotate(path)
        self._file = path.open("a", encoding="utf-8")
        self._written_bytes = 0
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_MAX)
        self._unmarked = 0
        self.dropped = 0
        """Turns that were not written."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the file has reached its size and wants a rotation, at the next turn."""
        return self._written_bytes >= self._file_bytes_max

    def post(self, line: Mapping[str, object]) -> None:
        """Write a line as soon as possible; never waits."""
        if self._unmarked and not self._offer({"dropped": self._unmarked}):
            self._unmarked += 1
            self.dropped += 1
            return
        self._unmarked = 0
        if not self._offer(line):
            self._unmarked = 1
            self.dropped += 1

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

    def _offer(self, line: Mapping[str, object]) -> bool:
        try:
            self._lines.put_nowait(json.dumps(line, separators=(",", ":")))
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if line == '{"rotate":true}':
                self._file.close()
                rotate(self._path)
                self._file = self._path.open("a", encoding="utf-8")
                continue
            try:
                self._file.write(line + "\n")
                if self._lines.empty():
                    self._file.flush()
                self._written_bytes += len(line) + 1
            except OSError:  # a full disk costs the journal, not the training
                self.dropped += 1
        try:
            self._file.close()
        except OSError:
            self.dropped += 1


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
