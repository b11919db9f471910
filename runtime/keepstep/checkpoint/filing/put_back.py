"""A committed checkpoint of files back into the folder where the script looks for it; what is torn goes aside.

All that is missing is brought under names that the script does not look at, checked, and only then renamed, the
`checkpoint` file last. Killed in between, the folder holds files that are whole each, and is put right the next time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.checkpoint.digests import ShortSlab, file_crc32c
from keepstep.checkpoint.files.contents import check_set, is_torn, is_under_way, read_listing, read_state
from keepstep.checkpoint.files.sets import (
    FileSet,
    Kind,
    Remains,
    family_of,
    find_sets,
    find_torn,
    parse_step,
)
from keepstep.checkpoint.files.state_file import STATE_NAME, format_state
from keepstep.checkpoint.files.unfit import UnfitFile
from keepstep.checkpoint.files.watched import Tree
from keepstep.checkpoint.filing.manifest import FilesManifest, StoredFile, StoredSet, as_object
from keepstep.checkpoint.receiving import receive
from keepstep.ports.store import ObjectStore

ASIDE = ".keepstep-aside"
"""Folder below the one that is watched for what was taken out of the script's way; emptied at the next time."""
_UNDER_WAY = ".keepstep-"
_MANY = (Kind.TENSORFLOW, Kind.BACKUP)


@dataclass
class PutBack:
    """What was done: sets brought from the store, and files and folders moved aside, by their place below the root."""

    brought: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)


def put_back(store: ObjectStore | None, manifest: FilesManifest | None, tree: Tree, *, own: bool) -> PutBack:
    """Have a folder hold what the manifest says, and nothing of the same writers that is newer or torn.

    Args:
        store: where the files are; None where there is no manifest.
        manifest: None puts nothing back, and takes away what is torn.
        tree: the folders that are watched; the root is made where it is not there.
        own: what the script wrote there after the manifest is its own and may be used where it is whole; else all hosts
            are to go on from the manifest.

    Raises:
        CorruptObject: an object differs from what the manifest says; the folder is as it was.
        NotFound: an object is gone, likewise.
        OSError: the folder can not be written.
        StoreError: the store's own.
    """
    done, root = PutBack(), tree.root
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(root / ASIDE, ignore_errors=True)
    stored: dict[str, list[StoredSet]] = {}
    for each in () if manifest is None else manifest.sets:
        stored.setdefault(each.folder, []).append(each)
    places = {tree.below(folder): folder for folder in tree.folders()} | {name: root / name for name in stored}
    assert store is not None or not stored, "what is to be brought lies somewhere"
    for folder in places.values():
        _remove_under_way(folder)
    views = {name: _Folder(folder, stored.get(name, []), own, tree.remains) for name, folder in places.items()}
    missing = [(view, each) for view in views.values() for each in view.missing]
    with contextlib.ExitStack() as undo:
        brought = [(view, each, _bring(store, view.folder, each, undo)) for view, each in missing if store]
        for view in views.values():
            done.aside += [_move_aside(root, view.folder / name) for name in view.in_the_way]
        for view, each, files in brought:
            for file, under_way in files:
                os.replace(under_way, view.folder / file.name)
            done.brought.append(each.label)
        undo.pop_all()
    for view in views.values():
        view.write_state()
    return done


def is_right(tree: Tree) -> bool:
    """Whether a script that wrote there finds something to go on from, and nothing torn."""
    views = [_Folder(folder, [], True, tree.remains) for folder in tree.folders()]
    return any(view.has_sets for view in views) and not any(view.in_the_way for view in views)


class _Folder:
    """One folder as it was found, and what is to become of it."""

    def __init__(self, folder: Path, stored: list[StoredSet], own: bool, remains: Remains | None) -> None:
        self.folder = folder
        self._stored = {each.writer[1:]: each for each in stored}
        listing = read_listing(folder) if folder.is_dir() else ()
        self._sets = find_sets(listing, read_state(folder), remains)
        self._whole = [each for each in self._sets if _is_whole(folder, each)]
        kept = self._kept(own)
        self.missing = [each for family, each in self._stored.items() if family not in kept]
        """Sets to bring from the store."""
        replaced = {file.name for each in self.missing for file in each.files}
        torn = [each for each in self._sets if each not in self._whole]
        # a lone file of a writer that nobody knows may be anything: it is left to the script
        gone = {f.name for s in torn if s.kind in _MANY or family_of(s) in self._stored for f in s.files}
        gone |= {file.name for each in self._later(kept) for file in each.files}
        gone |= {name for name in find_torn(listing, self._sets) if is_torn(folder, name)}
        gone |= _unfinished_folders(folder)
        staying = {file.name for each in kept.values() for file in each.files}
        self.in_the_way = sorted(gone - staying - replaced)
        """Names of what goes aside; what is brought anew replaces its like."""
        self.has_sets = bool(self._whole)
        self._kept_sets = [each for each in self._whole if not gone & {file.name for file in each.files}]

    def _kept(self, own: bool) -> dict[object, FileSet]:
        """By family of those that are stored: the set in the folder that stays the newest one."""
        kept: dict[object, FileSet] = {}
        for each in self._whole:  # the newest last
            stored = self._stored.get(family_of(each))
            if stored is None:
                continue
            same = (each.kind, each.name) == (stored.kind, stored.name) and _holds(self.folder, stored)
            if same or (own and _is_later(each, stored)):
                kept[family_of(each)] = each
        return kept

    def _later(self, kept: dict[object, FileSet]) -> Iterator[FileSet]:
        """Whole sets of a family that is stored which come after the one to go on from."""
        for each in self._whole:
            stored, stays = self._stored.get(family_of(each)), kept.get(family_of(each))
            if stored is not None and each is not stays and _is_later(each, stored):
                if stays is None or self._whole.index(each) > self._whole.index(stays):
                    yield each

    def write_state(self) -> None:
        """Have the `checkpoint` file name what is there, where the script has such a file."""
        named = {each.name for each in self._stored.values() if each.is_named}
        state = read_state(self.folder)
        there = [each for each in self._kept_sets if each.kind is Kind.TENSORFLOW]
        entries = {each.name: each.mtime_ns for each in there if each.is_named or each.name in named}
        for each in self.missing:
            if each.kind is Kind.TENSORFLOW and each.is_named:
                entries.pop(each.name, None)
                entries[each.name] = each.mtime_ns
        wanted = next(reversed(entries), "")
        if not wanted or (state.latest == wanted and state.prefixes == frozenset(entries)):
            return
        if (self.folder / STATE_NAME).is_dir():  # that is the script's, whatever it is
            return
        under_way = self.folder / f"{_UNDER_WAY}{STATE_NAME}"
        under_way.write_text(format_state(list(entries.items())), encoding="ascii")
        os.replace(under_way, self.folder / STATE_NAME)


def _is_later(each: FileSet, stored: StoredSet) -> bool:
    """Whether a set of the same family comes after a stored one; times count where steps do not tell."""
    step = parse_step(stored.kind, stored.name)
    if step is not None and each.step is not None and step != each.step:
        return each.step > step
    return each.mtime_ns > stored.mtime_ns


def _is_whole(folder: Path, each: FileSet) -> bool:
    try:
        check_set(folder, each)
    except (UnfitFile, OSError):
        return False
    return True


def _holds(folder: Path, stored: StoredSet) -> bool:
    """Whether a folder holds these very files."""
    for file in stored.files:
        try:
            fd = os.open(folder / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            same_size = os.fstat(fd).st_size == file.size_bytes
            if not same_size or f"{file_crc32c(fd, 0, file.size_bytes):08x}" != file.crc32c:
                return False
        except ShortSlab:
            return False
        finally:
            os.close(fd)
    return True


def _bring(
    store: ObjectStore, folder: Path, stored: StoredSet, undo: contextlib.ExitStack
) -> list[tuple[StoredFile, Path]]:
    """Fetch a set's files under other names, each checked and on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    brought = []
    for file in stored.files:
        under_way = folder / f"{_UNDER_WAY}{hashlib.blake2b(os.fsencode(file.name), digest_size=16).hexdigest()}"
        undo.callback(under_way.unlink, missing_ok=True)
        fd = os.open(under_way, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            receive(store, as_object(file), functools.partial(_write, fd))
            os.fsync(fd)
            os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(fd)
        brought.append((file, under_way))
    return brought


def _write(fd: int, piece: bytes, at: int) -> None:
    view = memoryview(piece)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _move_aside(root: Path, path: Path) -> str:
    below = path.relative_to(root)
    target = root / ASIDE / below
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)
    return below.as_posix()


def _remove_under_way(folder: Path) -> None:
    """Remove what a try that was killed left behind."""
    if folder.is_dir():
        for path in folder.glob(f"{_UNDER_WAY}*"):
            if path.is_file() and not path.is_symlink():
                path.unlink(missing_ok=True)


def _unfinished_folders(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    with os.scandir(folder) as entries:
        return {e.name for e in entries if e.is_dir(follow_symlinks=False) and is_under_way(folder / e.name)}
