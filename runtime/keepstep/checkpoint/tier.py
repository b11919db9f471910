"""Copies of what this host has written to the store, on a disk of its own: read from there where they are right.

For a container that starts anew on the same host. Names of objects carry generation and run, so a copy can be of
nothing else; its CRC stands in the file's name and is compared before anything is read from it. Whatever fails here
fails silently: the store has it all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from keepstep.checkpoint.digests import CHUNK_BYTES, ShortSlab, file_crc32c
from keepstep.checkpoint.keys import objects_prefix, parse_object_key
from keepstep.ports.store import Body, ObjectStat, ObjectStore, body_chunks

KEPT = 2
"""Checkpoints of which copies stay: the newest may be of a step that was never committed."""


class TieredStore:
    """A store, with copies of a job's objects in a folder."""

    def __init__(self, inner: ObjectStore, folder: Path, job: str) -> None:
        self._inner, self._folder, self._job = inner, folder, job
        self._lock = threading.Lock()
        self._right: set[Path] = set()

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        put = functools.partial(self._inner.put, key, body, if_absent=if_absent, if_match=if_match, crc32c=crc32c)
        if parse_object_key(self._job, key) is None or crc32c is None:
            return put()
        # beside it: a save that must be committed before a deadline has no time for one after the other
        copying = threading.Thread(target=self._copy, args=(key, body, crc32c), name="keepstep-tier")
        copying.start()
        try:
            return put()
        finally:
            copying.join()

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        at, end = start, None if size is None else start + size
        path = self._right_copy(key, anew=start == 0)
        if path is not None:
            with contextlib.suppress(OSError), path.open("rb") as file:
                whole = os.fstat(file.fileno()).st_size
                end = whole if end is None else min(whole, end)
                while at < end and (piece := os.pread(file.fileno(), min(CHUNK_BYTES, end - at), at)):
                    yield piece
                    at += len(piece)
        if end is None or at < end:
            yield from self._inner.get(key, at, None if end is None else end - at)

    def read(self, key: str, limit_bytes: int) -> bytes:
        return self._inner.read(key, limit_bytes)

    def stat(self, key: str) -> ObjectStat:
        return self._inner.stat(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self._inner.list(prefix)

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._inner.delete(key, if_match=if_match)

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        return self._inner.discard_unfinished(prefix, before_unix)

    def _copy(self, key: str, body: Body, crc32c: int) -> None:
        path = self._folder / f"{key}.{crc32c:08x}"
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._evict()  # first, so that there is room
            with unfinished.open("wb") as file:
                for piece in body_chunks(body):
                    file.write(piece)
            unfinished.replace(path)
        except (OSError, ShortSlab):
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def _evict(self) -> None:
        """Delete what is older than the newest checkpoints, the one that is being written among them."""
        found = []
        for folder in self._folder.glob(f"{objects_prefix(self._job)}g*/s*"):
            place = parse_object_key(self._job, f"{folder.relative_to(self._folder).as_posix()}/local-0.r")
            if place is not None:
                found.append((place, folder))
        for _, folder in sorted(found)[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

    def _right_copy(self, key: str, anew: bool) -> Path | None:
        """The copy of an object, where there is one with the bytes that its name tells.

        Args:
            key: the object's.
            anew: compare them again: whoever reads it from the beginning may do so since it was wrong.
        """
        with self._lock:
            for path in sorted(self._folder.glob(f"{key}.????????")):
                if path in self._right and not anew:
                    return path
                self._right.discard(path)
                with contextlib.suppress(OSError, ShortSlab):
                    with path.open("rb") as file:
                        crc = file_crc32c(file.fileno(), 0, os.fstat(file.fileno()).st_size)
                    if f"{crc:08x}" == path.name[-8:]:
                        self._right.add(path)
                        return path
                    path.unlink()
        return None
