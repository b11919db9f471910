"""Room on the disks that matter, each asked in a thread of its own: one whose server is away never answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.core.host_sample import Disk

_PATIENCE_S = 0.5
"""What a disk that works needs is far less; one that is late is asked about at the next look."""

Ask = Callable[[str], tuple[int, os.statvfs_result]]


def ask(folder: str) -> tuple[int, os.statvfs_result]:
    """Which file system a folder is on, and how full that is; may never return.

    Raises:
        OSError: the folder is not there.
    """
    return os.stat(folder).st_dev, os.statvfs(folder)


@dataclass
class _Asked:
    """The newest answer of a folder, and since when another one is waited for."""

    folder: str
    thread: threading.Thread | None = None
    since: float = 0.0
    device: int = -1
    answer: os.statvfs_result | None = None


class Disks:
    """The file systems of some folders; of several folders on one the first stands for all."""

    def __init__(self, folders: Sequence[str], asking: Ask = ask, patience_s: float = _PATIENCE_S) -> None:
        self._asking, self._patience_s = asking, patience_s
        self._asked = [_Asked(folder) for folder in dict.fromkeys(folders)]

    def look(self, at: float) -> tuple[Disk, ...]:
        """Ask all that do not owe an answer still, and wait for a moment. Not to be called from the loop.

        Args:
            at: now, in seconds of any clock that goes on evenly.
        """
        for each in self._asked:
            if each.thread is None:
                each.since = at
                each.thread = threading.Thread(target=self._ask, args=(each,), name="disk", daemon=True)
                each.thread.start()
        found: list[Disk] = []
        devices: set[int] = set()
        for each in self._asked:
            thread = each.thread
            if thread is not None:
                thread.join(self._patience_s)
                if thread.is_alive():
                    # who is late for the first time may be so for a busy machine
                    found.append(Disk(each.folder, silent_s=max(at - each.since, 1e-3)))
                    continue
                each.thread = None
            if each.answer is not None and each.device not in devices:
                devices.add(each.device)
                found.append(_disk(each.folder, each.answer))
        return tuple(found)

    def _ask(self, each: _Asked) -> None:
        try:
            each.device, each.answer = self._asking(each.folder)
        except OSError:
            each.answer = None


def _disk(folder: str, found: os.statvfs_result) -> Disk:
    return Disk(
        folder,
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        found.f_files,
        found.f_favail,
        bool(found.f_flag & os.ST_RDONLY),
    )
