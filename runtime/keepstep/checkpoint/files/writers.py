"""Who writes to a file, and copies of sets that stay as they are whatever the script does next. Linux only.

A lease is the one question that the kernel answers for all processes at once: a read lease is granted only where nobody
has the file open for writing. Where leases are refused (other people's files, some network file systems) the open files
of all processes are looked through, which says nothing of other hosts, nor of processes that may not be looked at.
Source: fcntl(2), proc(5); leases tried on ext4, tmpfs and overlayfs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path

from keepstep.checkpoint.files.contents import check_set, listed
from keepstep.checkpoint.files.sets import FileSet, Kind, ListedFile, is_data_file
from keepstep.checkpoint.files.state_file import STATE_NAME, format_state
from keepstep.checkpoint.files.unfit import ChangingFile, UncopiedFile, UnfitFile

_F_SETSIG = 10
_COPY_BYTES = 8 << 20
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
_NO_RANGE = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}


class Writing(StrEnum):
    """Whether anybody has a file open for writing."""

    NOBODY = "nobody"
    SOMEBODY = "somebody"
    UNKNOWN = "unknown"
    """Nobody of those who may be looked at."""


def writing(path: Path, proc: Path = Path("/proc")) -> Writing:
    """Whether any process has a file open for writing.

    Args:
        path: the file.
        proc: where processes are looked through if no lease is given.

    Raises:
        ChangingFile: it is not there.
        UncopiedFile: it can not be opened.
        UnfitFile: it is a link by now.
    """
    fd = _open(path)
    try:
        leased = _ask_lease(fd)
        return _ask_processes(os.fstat(fd), proc) if leased is Writing.UNKNOWN else leased
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise ChangingFile(path, f"{error.strerror}", "the file that was listed") from error
    except OSError as error:
        kind = UnfitFile if error.errno == errno.ELOOP else UncopiedFile  # what else there is may pass
        raise kind(path, f"{error.strerror}", "a file that can be read") from error


def _ask_lease(fd: int) -> Writing:
    """Ask the kernel; unknown where it gives no leases on this file."""
    try:
        # who opens the file for writing while the lease is held waits until it is given back, and the holder is sent a
        # signal: SIGIO would end this process, SIGURG is ignored where nobody asked for it
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return Writing.SOMEBODY if error.errno == errno.EAGAIN else Writing.UNKNOWN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return Writing.NOBODY


def _ask_processes(status: os.stat_result, proc: Path) -> Writing:
    """Look through the open files of all processes that may be looked at."""
    all_seen = True
    try:
        processes = [proc / name for name in os.listdir(proc) if name.isdecimal()]
    except OSError:
        return Writing.UNKNOWN
    for process in processes:
        try:
            descriptors = os.listdir(process / "fd")
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            all_seen = False
            continue
        if any(_writes(process, descriptor, status) for descriptor in descriptors):
            return Writing.SOMEBODY
    return Writing.NOBODY if all_seen else Writing.UNKNOWN


def _writes(process: Path, descriptor: str, status: os.stat_result) -> bool:
    try:
        if not os.path.samestat(os.stat(process / "fd" / descriptor), status):
            return False
        said = (process / "fdinfo" / descriptor).read_text()
    except OSError:  # closed meanwhile
        return False
    flags = next((line.split()[1] for line in said.splitlines() if line.startswith("flags:")), "0")
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def capture(folder: Path, found: FileSet, target: Path) -> tuple[ListedFile, ...]:
    """Make a copy of a set that is whole, in a folder of its own.

    TensorFlow's data files are linked where the file system allows it, since TensorFlow replaces them and does not
    change them; whoever else writes over one in place changes the copy, too, which `check_captured` finds. All else is
    copied. Where the `checkpoint` file names the set, the copy gets one that names it alone.

    Args:
        folder: where the set lies.
        found: the set, as it was listed.
        target: does not exist; is taken away again where the set is not whole.

    Returns:
        The copy's files as they are listed.

    Raises:
        ChangingFile: somebody writes to the set, or has since it was listed.
        UncopiedFile: it can not be copied.
        UnfitFile: its content is not whole.
    """
    try:
        target.mkdir()
    except OSError as error:
        raise UncopiedFile(target, f"{error.strerror}", "a folder for the copy") from error
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, target, ignore_errors=True)
        try:
            for file in found.files:
                _take(folder / file.name, file, target / file.name, found.kind)
            copies = tuple(listed(file.name, os.stat(target / file.name)) for file in found.files)
            for file in found.files:
                _check_unchanged(folder / file.name, file)
            _check_copy(folder, found, target)
            check_captured(target, copies)
            if found.is_named:
                (target / STATE_NAME).write_text(format_state([(found.name, found.mtime_ns)]), encoding="ascii")
        except OSError as error:
            raise UncopiedFile(target, f"{error.strerror or error}", "room for the copy of a set") from error
        undo.pop_all()
    return copies


def check_captured(target: Path, copies: tuple[ListedFile, ...]) -> None:
    """See that nobody has written to a copy's files since they were listed.

    Raises:
        ChangingFile: somebody has.
    """
    for file in copies:
        _compare(target / file.name, file, os.stat(target / file.name))


def _check_copy(folder: Path, found: FileSet, target: Path) -> None:
    try:
        check_set(target, found)
    except UnfitFile as error:  # told of the original, since the copy goes away
        raise UnfitFile(folder / Path(error.file).relative_to(target), error.found, error.wanted) from error


def _take(source: Path, file: ListedFile, target: Path, kind: Kind) -> None:
    if writing(source) is Writing.SOMEBODY:
        raise ChangingFile(source, "a process that has it open for writing", "none")
    if kind is Kind.TENSORFLOW and is_data_file(file.name) and _link(source, target):
        _compare(source, file, os.stat(target))
        return
    fd = _open(source)
    try:
        _compare(source, file, os.fstat(fd))
        _copy(fd, target, file.size_bytes)
        _compare(source, file, os.fstat(fd))
    finally:
        os.close(fd)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError as error:
        raise ChangingFile(source, f"{error.strerror}", "the file that was listed") from error
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _copy(fd: int, target: Path, size_bytes: int) -> None:
    """Copy that many bytes, within the kernel where it can."""
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    at, in_kernel = 0, True
    try:
        while at < size_bytes:
            size = min(_COPY_BYTES, size_bytes - at)
            copied = 0
            if in_kernel:
                try:
                    copied = os.copy_file_range(fd, out, size, at, at)
                except OSError as error:
                    if error.errno not in _NO_RANGE:
                        raise
                    in_kernel = False
            if not copied:  # some file systems say 0 where they can not
                copied = os.pwrite(out, os.pread(fd, size, at), at)
            if not copied:
                return  # the file ends before: comparing it with its listing says so
            at += copied
    finally:
        os.close(out)


def _check_unchanged(path: Path, file: ListedFile) -> None:
    """See that a name still stands for the file that was listed; TensorFlow and Keras may have taken it away."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    _compare(path, file, status)


def _compare(path: Path, file: ListedFile, status: os.stat_result) -> None:
    now = listed(file.name, status)
    if now != file:
        raise ChangingFile(path, _described(now), f"{_described(file)}, as it was listed")


def _described(file: ListedFile) -> str:
    return f"inode {file.inode}, {file.size_bytes} bytes, written to at {file.mtime_ns} ns"
