"""The file of what was seen: a JSON object a line, each on disk before anything else happens: the end may come soon."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Collection
from pathlib import Path

from keepstep.adapters.clock import unix_time
from keepstep.adapters.platform.rights import HIDDEN

TEXT_MAX = 400
"""Characters of any one text that is taken over."""
_WAITING_MAX = 10_000
_LAST_WORDS_S = 2.0


class Record:
    """Writes lines to a file and to standard output; from any thread.

    Standard output is written by a thread of its own: what is seen while nobody reads it still gets to the file.
    """

    def __init__(self, path: Path, host: str, secrets: Collection[str] = (), output: int = 1) -> None:
        """Go on with the file at `path`, or without it where it can not be made, and say so.

        Args:
            host: said in every line.
            secrets: what is hidden wherever it stands.
            output: the descriptor of standard output.
        """
        self._host, self._output = host, output
        self._secrets = sorted(secrets, key=len, reverse=True)  # one may be a part of another
        self._lock = threading.Lock()
        self._waiting: queue.Queue[bytes] = queue.Queue(_WAITING_MAX)
        self._printer = threading.Thread(target=self._print, name="printer", daemon=True)
        self._printer.start()
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self.write("record", path=str(path), error=str(error))
        else:
            self.write("record", path=str(path))

    def write(self, what: str, **found: object) -> None:
        """Write one line: when, where, what, and what was found."""
        line = {"at": round(unix_time(), 6), "host": self._host, "what": what, **found}
        data = json.dumps(self._clean(line)).encode() + b"\n"
        with self._lock:
            self._keep(data)
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(data)

    def close(self) -> None:
        """Have what waits printed, for a moment."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(b"")
        self._printer.join(_LAST_WORDS_S)

    def _keep(self, data: bytes) -> None:
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # a full disk is no reason to stop looking
            _write(self._fd, data)
            os.fsync(self._fd)

    def _print(self) -> None:
        while data := self._waiting.get():
            with contextlib.suppress(OSError):
                _write(self._output, data)

    def _clean(self, found: object) -> object:
        match found:
            case str():
                for secret in self._secrets:
                    found = found.replace(secret, HIDDEN)
                return found if len(found) <= TEXT_MAX else f"{found[:TEXT_MAX]}..."
            case dict():
                return {key: self._clean(value) for key, value in found.items()}
            case list() | tuple():
                return [self._clean(value) for value in found]
        return found


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
