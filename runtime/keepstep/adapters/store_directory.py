"""A store in a directory: of one machine, or of a file system that all hosts share and that supports flock.

An object appears by renaming a file that was written and synced elsewhere in the same directory tree; conditions are
checked and the rename is done under one lock. A writer holds a lock on its unfinished file, so that the files of dead
writers can be told from those of slow ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Event

from keepstep.ports.store import (
    Body,
    ChecksumMismatch,
    NotFound,
    ObjectStat,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    body_chunks,
    body_size,
    joined,
)

PIECE_BYTES = 1 << 20
HASHED_BYTES_MAX = 1 << 20
"""Up to this length the etag is a hash of the content; what is longer is never replaced by comparison."""
LOCK_ATTEMPTS = 500
LOCK_POLL_S = 0.02

_COMPONENT = re.compile(r"[A-Za-z0-9_=+@,-][A-Za-z0-9._=+@,-]{0,254}")
_UNFINISHED, _LOCK = ".unfinished", ".lock"
_PERMANENT = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENODEV, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL,
}  # fmt: skip


class DirectoryStore:
    """Objects as files below `root`, which is made where it is absent."""

    def __init__(self, root: Path) -> None:
        """Make the directory ready.

        Raises:
            StoreRefused: it can not be made or written.
        """
        self._root = root
        with _translated(str(root), absent=StoreRefused):
            (root / _UNFINISHED).mkdir(parents=True, exist_ok=True)

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        path = self._path(key)
        with _translated(key, absent=StoreUnavailable), self._unfinished() as (fd, unfinished):
            _write(fd, key, body, crc32c)
            os.fsync(fd)
            with self._lock():
                if if_absent and path.exists():
                    raise PreconditionFailed(f"{key} exists")
                if if_match is not None:
                    _check_etag(path, key, if_match)
                self._make_parents(path)
                os.rename(unfinished, path)
                _sync_directory(path.parent)
                return _stat(path, key).etag

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        with _translated(key):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = None if size is None else start + size
            while end is None or start < end:
                with _translated(key):
                    piece = os.pread(fd, PIECE_BYTES if end is None else min(PIECE_BYTES, end - start), start)
                if not piece:
                    return
                start += len(piece)
                yield piece
        finally:
            os.close(fd)

    def read(self, key: str, limit_bytes: int) -> bytes:
        return joined(self.get(key), key, limit_bytes)

    def stat(self, key: str) -> ObjectStat:
        with _translated(key):
            return _stat(self._path(key), key)

    def list(self, prefix: str) -> Iterator[str]:
        folder = self._root / prefix.rpartition("/")[0]
        for parent, folders, files in os.walk(folder, onerror=_refuse_unreadable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                key = Path(parent, name).relative_to(self._root).as_posix()
                if key.startswith(prefix) and not name.startswith("."):
                    yield key

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        path = self._path(key)
        with _translated(key, absent=StoreUnavailable), self._lock():
            if if_match is not None:
                _check_etag(path, key, if_match)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                for parent in path.parents:
                    if parent == self._root or any(parent.iterdir()):
                        break
                    parent.rmdir()

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        """Remove the files of dead writers; for which key they were is not known, so `prefix` does not matter."""
        discarded = 0
        with _translated(_UNFINISHED, absent=StoreUnavailable):
            for path in (self._root / _UNFINISHED).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < before_unix and _is_abandoned(path):
                        path.unlink()
                        discarded += 1
        return discarded

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(_COMPONENT.fullmatch(part) for part in parts):
            raise StoreRefused(f"{key!r} can not be a key of a directory store")
        return self._root.joinpath(*parts)

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[tuple[int, Path]]:
        """A file of our own to write into; gone at the end, or renamed to what it became."""
        path = self._root / _UNFINISHED / uuid.uuid4().hex
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, path
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            os.close(fd)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """The lock under which names change. A frozen holder must not freeze everybody: waiting has an end."""
        fd = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for _ in range(LOCK_ATTEMPTS):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    Event().wait(LOCK_POLL_S)
            else:
                raise StoreUnavailable(f"{self._root / _LOCK} is held by another process")
            yield
        finally:
            os.close(fd)

    def _make_parents(self, path: Path) -> None:
        missing = [parent for parent in path.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            _sync_directory(parent.parent)


def _write(fd: int, key: str, body: Body, crc32c: int | None) -> None:
    done, crc = 0, 0
    for piece in body_chunks(body):
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]
        done += len(piece)
        if crc32c is not None:
            crc = _extend_crc(crc, piece)
    if done != body_size(body) or (crc32c is not None and crc != crc32c):
        raise ChecksumMismatch(f"{key}: {done} bytes with CRC32C {crc:08x} are not what was announced")


def _extend_crc(crc: int, piece: bytes) -> int:
    from awscrt import checksums

    return int(checksums.crc32c(piece, crc))


def _check_etag(path: Path, key: str, etag: str) -> None:
    try:
        found = _stat(path, key).etag
    except FileNotFoundError:
        found = None
    if found != etag:
        raise PreconditionFailed(f"{key} is another object than the one that was seen")


def _stat(path: Path, key: str) -> ObjectStat:
    """Size and etag of one and the same file, whatever is renamed over it meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_size <= HASHED_BYTES_MAX:
            etag = hashlib.sha256(os.pread(fd, HASHED_BYTES_MAX, 0)).hexdigest()
        else:
            etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
        return ObjectStat(found.st_size, etag, found.st_mtime)
    finally:
        os.close(fd)


def _is_abandoned(path: Path) -> bool:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise _store_error("list", error, NotFound) from error


def _store_error(what: str, error: OSError, absent: type[StoreError]) -> StoreError:
    if isinstance(error, FileNotFoundError):
        kind = absent
    else:
        kind = StoreRefused if error.errno in _PERMANENT else StoreUnavailable
    return kind(f"{what}: {error.strerror} ({error.filename})" if error.filename else f"{what}: {error.strerror}")


@contextlib.contextmanager
def _translated(what: str, absent: type[StoreError] = NotFound) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _store_error(what, error, absent) from error
