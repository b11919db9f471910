"""The uploader's part in keeping what a script writes itself: it watches the folder, copies, commits and puts back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.adapters import clock
from keepstep.app.giving import InvalidCommand, number, text
from keepstep.checkpoint.commit import read_head
from keepstep.checkpoint.files.unfit import UnfitFile
from keepstep.checkpoint.files.watched import Edition, Watched
from keepstep.checkpoint.filing.keeping import keep, newest_files, sweep_files
from keepstep.checkpoint.filing.manifest import read_files_manifest
from keepstep.checkpoint.filing.put_back import PutBack, is_right, put_back
from keepstep.checkpoint.keys import files_line, is_run
from keepstep.checkpoint.retention import Retention, Swept
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.ports.store import NotFound, ObjectStore, StoreUnavailable

if TYPE_CHECKING:
    from keepstep.adapters.folder_events import FolderEvents

LOOK_EVERY_S = 2.0
"""Hints may be lost: as often as this the folder is looked at without one."""
_PAUSE_S = 0.2
"""Between two looks, however many hints there are: a log that is written to at each step makes many."""


class Stuck(Exception):
    """The script's folder can not be put right."""


class Filing:
    """The folder that is watched, if any."""

    def __init__(self) -> None:
        self._watched: Watched | None = None
        self._events: FolderEvents | None = None
        self._opening = threading.Lock()
        self._hint, self._never = threading.Event(), threading.Event()
        self._told: tuple[str, ...] = ()

    def open(self, command: Mapping[str, Any], store: Path | None) -> None:
        """Begin to watch, where that was not done yet.

        Args:
            command: root, spool, after.
            store: the folder of the job's objects where the store is a directory: nothing in it is the script's.
        """
        with self._opening:
            if self._watched is None:
                root, skip = Path(text(command, "root")), frozenset() if store is None else frozenset([store])
                self._watched = Watched(root, Path(text(command, "spool")), number(command, "after"), skip)

    def watch(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Wait until there is a newer edition than the one the agent knows, or something is wrong, or time is up."""
        after, until = number(command, "after"), clock.monotonic() + number(command, "wait_s")
        watched = self._the_watched()
        while True:
            self._listen(watched.folders())
            self._hint.clear()
            edition, trouble = watched.scan()
            left_s = until - clock.monotonic()
            if edition.number > after or (trouble and trouble != self._told) or left_s <= 0:
                self._told = trouble
                return {**_shown(edition), "trouble": list(trouble)}
            if self._hint.wait(min(LOOK_EVERY_S, left_s)):
                self._never.wait(min(_PAUSE_S, left_s))

    def _listen(self, folders: tuple[Path, ...]) -> None:
        if folders and self._events is None:
            from keepstep.adapters.folder_events import FolderEvents

            self._events = FolderEvents(self._hint.set)
        if self._events is not None:
            self._events.listen(folders)

    def settle(self) -> dict[str, object]:
        """Go over the folder now."""
        edition, trouble = self._the_watched().scan()
        return {**_shown(edition), "trouble": list(trouble)}

    def keep(self, command: Mapping[str, Any], store: ObjectStore, job: str) -> dict[str, object]:
        """Commit the newest edition, which may be newer than the one that was asked for."""
        run, begun, watched = text(command, "run"), clock.monotonic(), self._the_watched()
        if not is_run(run):
            raise InvalidCommand(f"{run!r} can not be a run's nonce")
        watched.scan()
        with watched.reading() as edition:
            # what a former uploader had copied may be gone, and its writer's files with it
            kept = keep(store, job, edition, number(command, "generation"), run, int(clock.unix_time()))
        return {
            "edition": edition.number,
            "manifest": "" if kept.manifest is None else kept.manifest.key,
            "number": 0 if kept.manifest is None else kept.manifest.step,
            "uploaded_bytes": kept.uploaded_bytes,
            "seconds": clock.monotonic() - begun,
        }

    def put_back(self, command: Mapping[str, Any], store: Callable[[], ObjectStore], job: str) -> dict[str, object]:
        """Have the folder hold what a manifest says. With no manifest, and nothing of its own, it stays as it is.

        Raises:
            Stuck: the folder can not be written to.
        """
        key, own, watched = text(command, "manifest"), command.get("own") is True, self._the_watched()
        manifest, source, done = None, None, PutBack()
        try:
            if key:
                source = store()
                manifest = read_files_manifest(source, files_line(job), key)
        except StoreUnavailable:
            if not own or not watched.change(is_right):
                raise
        try:
            if manifest is not None or own:
                done = watched.change(lambda tree: put_back(source, manifest, tree, own=own))
        except (OSError, UnfitFile) as error:
            raise Stuck(str(error)) from error
        if manifest is not None:
            watched.pass_over(manifest.has)
        edition, _ = watched.scan()
        return {**_shown(edition), "brought": done.brought, "aside": done.aside}

    def newest(self, store: ObjectStore, job: str, without: frozenset[str]) -> dict[str, object]:
        """Manifest of the newest committed checkpoint of files, and the generation that has their HEAD."""
        head = read_head(store, files_line(job)).head
        manifest = None if head is None else newest_files(store, job, without)
        return {
            "files": "" if manifest is None else manifest.key,
            "files_generation": 0 if head is None else head.generation,
        }

    def sweep(self, store: ObjectStore, job: str, generation: int, keep_last: int) -> Swept:
        """Delete what retention lets go of the script's files, unless their HEAD carries a newer generation.

        Nothing where it is not known what one of those that are kept names.
        """
        try:
            return sweep_files(store, job, generation, Retention(keep_last), clock.unix_time())
        except (MalformedDocument, NotFound):
            return Swept(0, 0, 0)

    def _the_watched(self) -> Watched:
        if self._watched is None:
            raise InvalidCommand("no folder is watched yet")
        return self._watched


def _shown(edition: Edition) -> dict[str, object]:
    labels = [f"{each.folder}/{each.found.name}" if each.folder else each.found.name for each in edition.sets]
    return {"edition": edition.number, "sets": labels}
