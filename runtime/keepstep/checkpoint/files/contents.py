"""A folder's files as they are on disk: its listing, and whether the content of a set is whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keepstep.checkpoint.files.bundle import check_bundle, check_tensors
from keepstep.checkpoint.files.keras_files import check_hdf5, check_keras
from keepstep.checkpoint.files.sets import (
    BACKUP_METADATA,
    FileSet,
    Kind,
    ListedFile,
    Remains,
    find_sets,
    is_index,
    is_saved_part,
)
from keepstep.checkpoint.files.state_file import STATE_BYTES_MAX, STATE_NAME, NamedCheckpoints, parse_state
from keepstep.checkpoint.files.table import MAGIC_BYTES
from keepstep.checkpoint.files.unfit import UnfitFile
from keepstep.checkpoint.strict_json import MalformedDocument, parse_object

METADATA_BYTES_MAX = 1 << 20
LISTED_MAX = 100_000
_SAVING_SUFFIX = "_temp"


def listed(name: str, status: os.stat_result) -> ListedFile:
    """What a listing shows of a file."""
    return ListedFile(name, status.st_size, status.st_mtime_ns, status.st_ino)


def read_listing(folder: Path) -> tuple[ListedFile, ...]:
    """The regular files of a folder, links to files left out; what goes away meanwhile is not in it.

    Raises:
        UnfitFile: there is no such folder, or it holds more files than any script's checkpoints.
    """
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.append(listed(entry.name, status))
                if len(found) > LISTED_MAX:
                    raise UnfitFile(folder, f"more than {LISTED_MAX} files", "a folder of checkpoints")
    except OSError as error:
        raise UnfitFile(folder, f"{error.strerror}", "a folder of checkpoints") from error
    return tuple(found)


def read_state(folder: Path) -> NamedCheckpoints:
    """What the folder's `checkpoint` file names; nothing where there is none, or a folder of that name.

    Raises:
        UnfitFile: it can not be read.
    """
    path = folder / STATE_NAME
    try:
        return parse_state(_read_small(path, STATE_BYTES_MAX).decode("utf-8", "surrogateescape"))
    except (FileNotFoundError, IsADirectoryError):
        return NamedCheckpoints()
    except OSError as error:
        raise UnfitFile(path, f"{error.strerror}", "a state file, or none") from error


def is_under_way(folder: Path) -> bool:
    """Whether TensorFlow was saving into a folder: it is called after the prefix, and holds nothing but parts."""
    if not folder.name.endswith(_SAVING_SUFFIX):
        return False
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return bool(names) and all(map(is_saved_part, names))


def is_torn(folder: Path, name: str) -> bool:
    """Whether a file that by its name is left of a torn set may be: a lone `.index` can be anybody's."""
    if not is_index(name):
        return True
    try:
        with (folder / name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - len(MAGIC_BYTES)))
            return file.read() == MAGIC_BYTES
    except OSError:
        return False


def read_sets(folder: Path, remains: Remains | None = None) -> tuple[FileSet, ...]:
    """The sets of a folder that are complete by their names, the newest last; see `find_sets`.

    Raises:
        UnfitFile: the folder can not be read.
    """
    return find_sets(read_listing(folder), read_state(folder), remains)


def check_set(folder: Path, found: FileSet) -> None:
    """Read every byte of a set and see that it is whole.

    Raises:
        UnfitFile: it is not. Of HDF5 files a changed value is not found.
    """
    if found.kind is Kind.TENSORFLOW:
        check_tensors(folder, found.name, check_bundle(folder, found.name))
    elif found.kind is Kind.KERAS:
        check_keras(folder / found.name)
    else:
        check_hdf5(folder / found.name)
        if found.kind is Kind.BACKUP:
            read_epoch(folder)


def read_epoch(folder: Path) -> int:
    """Epoch at which Keras's `BackupAndRestore` would go on from the pair in a folder, counted from 0.

    Raises:
        UnfitFile: the metadata are not those that it writes.
    """
    path = folder / BACKUP_METADATA
    try:
        document = parse_object(_read_small(path, METADATA_BYTES_MAX), str(path), {"epoch": int, "batch": int})
    except OSError as error:
        raise UnfitFile(path, f"{error.strerror}", "epoch and batch") from error
    except MalformedDocument as error:
        raise UnfitFile(path, str(error), "epoch and batch") from error
    return int(document["epoch"])


def _read_small(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise UnfitFile(path, f"more than {bytes_max} bytes", "a small file")
    return data
