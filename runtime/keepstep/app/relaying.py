"""A process that uploads what the script leaves in the platform's folder for intermediate output, as it comes.

`python -m keepstep.app.relaying` reads one JSON object from its standard input: name, folder, url, [region, endpoint].
It goes on until that input ends, then looks once more and ends. A file is uploaded once it has been left alone for a
moment, and again whenever it was written anew; what the script removes stays in S3, as with AWS's toolkit.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from keepstep import kernel
from keepstep.adapters.folder_events import FolderEvents
from keepstep.adapters.output_bucket import OutputBucket
from keepstep.errors import StoreRefusedError

_LOOK_S = 1.0
"""How often the folder is gone through where nothing hints at a change, and for how long a file is to be left alone."""
_LAST_LOOKS = 3


class Version(NamedTuple):
    """What tells one content of a file from another."""

    inode: int
    size_bytes: int
    written_ns: int


class Relay:
    """What was uploaded, and what is still to be."""

    def __init__(self, folder: Path, put: Callable[[Path, str], None], log: Callable[[str], None]) -> None:
        self._folder, self._put, self._log = folder, put, log
        self._done: dict[str, Version] = {}
        self._seen: dict[str, Version] = {}
        self._failed: set[str] = set()

    def look(self, last: bool = False) -> int:
        """Upload each file that is as it was at the look before, or, at the `last` one, any; return how many failed."""
        found, failed = dict(_files(self._folder)), 0
        for name, version in found.items():
            if self._done.get(name) != version and (last or self._seen.get(name) == version):
                failed += not self._relay(name, version)
        self._seen = found
        return failed

    def _relay(self, name: str, version: Version) -> bool:
        path = self._folder / name
        try:
            self._put(path, name)
        except FileNotFoundError:  # it was there for a moment only
            return True
        except (StoreRefusedError, OSError) as error:
            if name not in self._failed:
                self._failed.add(name)
                self._log(f"{name} is not uploaded yet: {error}")
            return False
        self._failed.discard(name)
        if _version(path) == version:  # else it was written meanwhile, and is uploaded again
            self._done[name] = version
        return True

    def folders(self) -> list[Path]:
        """The folder, and all below it."""
        return [Path(place) for place, _, _ in os.walk(self._folder)]


def _files(folder: Path) -> Iterator[tuple[str, Version]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            version = _version(path)
            if version is not None:
                yield str(path.relative_to(folder)), version


def _version(path: Path) -> Version | None:
    """None for what is no file, or gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Version(found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _wait_for_the_end(awake: queue.SimpleQueue[bool]) -> None:
    sys.stdin.read()
    awake.put(True)


def _is_over(awake: queue.SimpleQueue[bool]) -> bool:
    """Wait for a hint, or for a moment; all that has come by then is one hint."""
    said = [False]
    with contextlib.suppress(queue.Empty):
        said.append(awake.get(timeout=_LOOK_S))
        while True:
            said.append(awake.get_nowait())
    return any(said)


def main() -> int:
    """Relay until the standard input ends."""
    kernel.die_with_parent(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the agent says when it is over
    task = json.loads(sys.stdin.readline())
    folder = Path(task["folder"])
    bucket = OutputBucket(task["url"], task.get("region"), task.get("endpoint"))
    relay = Relay(folder, bucket.put, lambda text: print(f"{task['name']} | {text}", file=sys.stderr, flush=True))
    awake: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=_wait_for_the_end, args=(awake,), daemon=True).start()
    events = FolderEvents(lambda: awake.put(False))
    while True:
        events.listen(relay.folders())
        if _is_over(awake):
            break
        relay.look()
    return int(not any(relay.look(last=True) == 0 for _ in range(_LAST_LOOKS)))


if __name__ == "__main__":
    sys.exit(main())
