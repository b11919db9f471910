"""Hints that something changed in folders. A hint may be lost, repeated or late: who cares looks for itself.

Source: watchdog 7's `Observer` over inotify, told of each folder by itself, since TensorFlow makes and removes one for
each save. Where the kernel has no watches left, or the file system says nothing, there are no hints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from watchdog.events import FileClosedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch


class FolderEvents:
    """Calls when a file in one of the folders was written and closed, or renamed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._handler = _Handler(changed)
        self._observer = Observer()
        self._observer.daemon = True
        self._begun = False
        self._watched: dict[Path, tuple[int, ObservedWatch]] = {}

    def listen(self, folders: Iterable[Path]) -> None:
        """Listen to these folders from now on, and to no others; those that can not be listened to are left out."""
        if not self._begun:
            self._observer.start()
            self._begun = True
        there = {folder: inode for folder in folders if (inode := _inode(folder))}
        for folder, (inode, watch) in list(self._watched.items()):
            if there.get(folder) != inode:  # gone, or another one of that name
                self._observer.unschedule(watch)
                del self._watched[folder]
        for folder in there.keys() - self._watched.keys():
            try:
                watch = self._observer.schedule(
                    self._handler, str(folder), event_filter=[FileClosedEvent, FileMovedEvent]
                )
            except OSError:
                continue
            self._watched[folder] = there[folder], watch


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except OSError:
        return 0


class _Handler(FileSystemEventHandler):
    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._changed()
