"""A tree of folders in which a script writes its checkpoints, and whole copies of the newest ones, made aside.

What a script writes is gone over again whenever somebody asks; nothing is believed but what is on the disk then. Of
each writer (a folder and a name without its step) the newest whole set is copied. Deleting is not followed: Keras's
`BackupAndRestore` takes its folder away when all went well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from keepstep.checkpoint.files.contents import is_under_way, read_sets
from keepstep.checkpoint.files.sets import FileSet, Kind, ListedFile, Remains, family_of, is_ignored
from keepstep.checkpoint.files.unfit import ChangingFile, UncopiedFile, UnfitFile
from keepstep.checkpoint.files.writers import capture
from keepstep.core.values import frozen

WRITERS_MAX = 16
"""Of more writers than this those that wrote last count: names without a step in them make one each."""
_DEPTH_MAX = 8
_SAVED_VARIABLES = "variables"
"""The folder of a SavedModel's variables, and what their files begin with: without its graph they are no checkpoint."""

Result = TypeVar("Result")
Writer = tuple[str, Kind, str]
"""Folder below the root, form, name without the step."""


@frozen
class Tree:
    """Folders in which a script may write checkpoints: `root` and what is below it, but for `skip`.

    Attributes:
        remains: of what lies there, what did so before anybody watched; None where that is not known.
    """

    root: Path
    skip: frozenset[Path] = frozenset()
    remains: Remains | None = None

    def folders(self) -> Iterator[Path]:
        """Those that there are, the root first; links are not followed."""
        yield from self._walk(self.root, _DEPTH_MAX)

    def below(self, folder: Path) -> str:
        """A folder's place below the root, with slashes; empty for the root itself."""
        below = folder.relative_to(self.root).as_posix()
        return "" if below == "." else below

    def _walk(self, folder: Path, depth: int) -> Iterator[Path]:
        if folder in self.skip or not folder.is_dir() or _is_part_of_a_saved_model(folder):
            return
        yield folder
        try:
            with os.scandir(folder) as entries:
                names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not is_ignored(e.name))
        except OSError:  # taken away meanwhile
            return
        names = [name for name in names if not is_under_way(folder / name)]
        if depth > 0:
            for name in names:
                yield from self._walk(folder / name, depth - 1)


def _is_part_of_a_saved_model(folder: Path) -> bool:
    """Whether it holds a SavedModel's variables; its graph beside the folder is written last."""
    return folder.name == _SAVED_VARIABLES and (folder / f"{_SAVED_VARIABLES}.index").exists()


@frozen
class CopiedSet:
    """A set of which a whole copy lies aside.

    Attributes:
        folder: where the script wrote it, below the root, with slashes; empty for the root itself.
        found: the set as it was listed there.
        place: the folder that holds the copy.
        copies: the copy's files as they were listed when it was made.
    """

    folder: str
    found: FileSet
    place: Path
    copies: tuple[ListedFile, ...]


@frozen
class Edition:
    """The newest whole set of each writer, by writer; `number` grows with each change."""

    number: int
    sets: tuple[CopiedSet, ...]


@dataclass
class _Memory:
    """What was copied, what need not be, and what was found unfit as it was listed: not read again until it changes."""

    copied: dict[Writer, CopiedSet] = field(default_factory=dict)
    passed: dict[Writer, FileSet] = field(default_factory=dict)
    unfit: dict[Writer, frozenset[FileSet]] = field(default_factory=dict)


class Watched:
    """The tree, and the copies. May be asked from several threads."""

    def __init__(self, root: Path, spool: Path, number: int = 0, skip: frozenset[Path] = frozenset()) -> None:
        """Take what lies in `spool` away: it is nobody's any more.

        Args:
            root: the tree; need not be there yet.
            spool: a folder for the copies.
            number: that of the newest edition anybody knows of.
            skip: folders within the tree of which nothing is the script's.
        """
        self._tree, self._spool, self._number = Tree(root, skip), spool, number
        self._memory = _Memory()
        self._lock, self._copies = threading.Lock(), 0
        self._reading: list[Edition] = []
        shutil.rmtree(spool, ignore_errors=True)

    def folders(self) -> tuple[Path, ...]:
        """The tree's folders as they are now."""
        return tuple(self._tree.folders())

    def scan(self) -> tuple[Edition, tuple[str, ...]]:
        """Go over the tree, copy what is new and whole, and say which edition there is now, and what was found unfit.

        What is being written is passed over in silence: it is looked at again the next time.
        """
        with self._lock:
            self._begin()
            trouble: list[str] = []
            before = dict(self._memory.copied)
            for folder in self._tree.folders():
                self._scan_folder(folder, trouble)
            while len(self._memory.copied) > WRITERS_MAX:
                oldest = min(self._memory.copied, key=lambda writer: self._memory.copied[writer].found.mtime_ns)
                self._memory.passed[oldest] = self._memory.copied.pop(oldest).found
            if self._memory.copied != before:
                self._number += 1
            self._drop_outdated()
            return self._edition(), tuple(trouble)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Edition]:
        """The newest edition, whose copies stay until the block ends."""
        with self._lock:
            edition = self._edition()
            self._reading.append(edition)
        try:
            yield edition
        finally:
            with self._lock:
                self._reading.remove(edition)
                self._drop_outdated()

    def change(self, put_right: Callable[[Tree], Result]) -> Result:
        """Change the tree while nobody goes over it."""
        with self._lock:
            self._begin()
            return put_right(self._tree)

    def pass_over(self, is_known: Callable[[str, FileSet], bool]) -> None:
        """Copy none of these sets as long as they stay what they are.

        Args:
            is_known: told of a folder below the root, and of the newest set of a writer in it.
        """
        with self._lock:
            for folder in self._tree.folders():
                below = self._tree.below(folder)
                with contextlib.suppress(UnfitFile):
                    newest = {(below, *family_of(found)): found for found in read_sets(folder, self._tree.remains)}
                    passed = {w: found for w, found in newest.items() if is_known(below, found)}
                    self._memory.passed |= passed
                    for writer in passed:  # what was copied may be what was just moved aside
                        self._memory.copied.pop(writer, None)

    def _begin(self) -> None:
        """Note what is there before the script has written anything, once all of it can be read.

        What an uploader finds that follows another one counts as that, too.
        """
        if self._tree.remains is None:
            with contextlib.suppress(UnfitFile):  # `scan` tells it
                remains = frozenset(found.files for folder in self._tree.folders() for found in read_sets(folder))
                self._tree = replace(self._tree, remains=remains)

    def _edition(self) -> Edition:
        copied = self._memory.copied
        return Edition(self._number, tuple(copied[writer] for writer in sorted(copied)))

    def _scan_folder(self, folder: Path, trouble: list[str]) -> None:
        try:
            sets = read_sets(folder, self._tree.remains)
        except UnfitFile as error:
            trouble.append(str(error))
            return
        below = self._tree.below(folder)
        newest_first: dict[Writer, list[FileSet]] = {}
        for found in reversed(sets):
            newest_first.setdefault((below, *family_of(found)), []).append(found)
        for writer in list(newest_first)[:WRITERS_MAX]:
            self._copy_newest(writer, newest_first[writer], folder, trouble)

    def _copy_newest(self, writer: Writer, newest_first: list[FileSet], folder: Path, trouble: list[str]) -> None:
        """Copy the newest set of a writer; where that can not be, and none was copied before, the one before it."""
        known = self._memory.copied.get(writer)
        unfit = self._memory.unfit[writer] = self._memory.unfit.get(writer, frozenset()) & frozenset(newest_first)
        passed = self._memory.passed.get(writer)
        if passed is not None and passed.files == newest_first[0].files:
            return
        for found in newest_first:
            if known is not None and known.found.files == found.files:
                self._memory.copied[writer] = replace(known, found=found)  # the `checkpoint` file may name it by now
                return
            if found not in unfit:
                place = self._spool / str(self._copies + 1)
                try:
                    copies = self._copy(folder, found, place)
                except ChangingFile:
                    pass
                except (UncopiedFile, OSError) as error:
                    trouble.append(str(error))
                except UnfitFile as error:
                    self._memory.unfit[writer] |= {found}
                    trouble.append(str(error))
                else:
                    self._memory.copied[writer] = CopiedSet(writer[0], found, place, copies)
                    return
            if known is not None:
                return  # what was copied before is at least as new as what is left in the folder

    def _copy(self, folder: Path, found: FileSet, place: Path) -> tuple[ListedFile, ...]:
        self._copies += 1
        self._spool.mkdir(parents=True, exist_ok=True)
        return capture(folder, found, place)

    def _drop_outdated(self) -> None:
        wanted = {copied.place for copied in self._memory.copied.values()}
        wanted |= {copied.place for edition in self._reading for copied in edition.sets}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(self._spool):
                if self._spool / name not in wanted:
                    shutil.rmtree(self._spool / name, ignore_errors=True)
