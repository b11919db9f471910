"""An object read back and compared with its manifest: piece by piece, in ranges side by side, and again if need be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from keepstep.checkpoint.aggregate import CorruptObject
from keepstep.checkpoint.digests import combine_crc32c, crc32c
from keepstep.checkpoint.manifest import StoredObject
from keepstep.checkpoint.streams import Streams, divide
from keepstep.ports.store import ObjectStore

RANGE_BYTES_MIN, RANGE_BYTES_MAX = 16 << 20, 64 << 20
"""Of a large one what a request costs is below one percent; one that breaks off is read again from its beginning."""
READINGS = 3
"""How often an object is read before it counts as corrupt: a checkpoint is given up for it, and steps are lost."""

Place = Callable[[bytes, int], None]
"""Takes bytes and where in the object they lie."""


def receive(store: ObjectStore, stored: StoredObject, place: Place) -> None:
    """Read an object whole, in order, and see that it is what the manifest says.

    Raises:
        CorruptObject: size or CRC differ; what was placed is worth nothing then.
        StoreError: the store's own.
    """
    done, crc = 0, 0
    for piece in store.get(stored.key):
        if done + len(piece) > stored.size_bytes:
            raise CorruptObject(f"{stored.key}: longer than the {stored.size_bytes} bytes of the manifest")
        place(piece, done)
        crc = crc32c(piece, crc)
        done += len(piece)
    if done != stored.size_bytes:
        raise CorruptObject(f"{stored.key}: {done} bytes, the manifest says {stored.size_bytes}")
    _compare(stored, crc)


def at_last(read: Callable[[], None]) -> None:
    """Call `read` until it finds the object to be right: what is wrong may have become so on its way.

    Raises:
        CorruptObject: it is wrong each time.
        StoreError: the store's own.
    """
    for _ in range(READINGS - 1):
        with suppress(CorruptObject):
            read()
            return
    read()


class Ranges:
    """Reads large objects in ranges side by side. May be used by several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._streams = Streams("ranges")

    def receive(self, stored: StoredObject, place: Place) -> None:
        """As `receive`, in no order: `place` is called by several threads.

        Raises:
            CorruptObject: size or CRC differ; what was placed is worth nothing then.
            StoreError: the store's own.
        """
        if len(divide(stored.size_bytes, RANGE_BYTES_MIN, RANGE_BYTES_MAX)) <= 1:
            self._streams.run([partial(receive, self._store, stored, place)])
            return
        _compare(stored, self.receive_part(stored, 0, stored.size_bytes, place))

    def receive_part(self, stored: StoredObject, start: int, size_bytes: int, place: Place) -> int:
        """Read a part of an object, likewise; returns its CRC32C, which only the whole object's can prove right.

        Raises:
            CorruptObject: the object is too short or too long.
            StoreError: the store's own.
        """
        ranges = [(start + at, size) for at, size in divide(size_bytes, RANGE_BYTES_MIN, RANGE_BYTES_MAX)]
        crcs = self._streams.run([partial(self._range, stored, begin, size, place) for begin, size in ranges])
        return combine_crc32c((crc, size) for crc, (_, size) in zip(crcs, ranges, strict=True))

    def close(self) -> None:
        """Let go of the threads."""
        self._streams.close()

    def _range(self, stored: StoredObject, begin: int, size_bytes: int, place: Place) -> int:
        at, crc, end, pace = begin, 0, begin + size_bytes, self._streams.pace()
        for piece in self._store.get(stored.key, begin, size_bytes):
            if at + len(piece) > end:
                raise CorruptObject(f"{stored.key}: more bytes than the {size_bytes} from {begin} on")
            place(piece, at)
            crc, at = crc32c(piece, crc), at + len(piece)
            pace.moved(len(piece))
        if at != end:
            raise CorruptObject(f"{stored.key}: ends at {at}, the manifest says {stored.size_bytes} bytes")
        return crc


def _compare(stored: StoredObject, crc: int) -> None:
    if f"{crc:08x}" != stored.crc32c:
        raise CorruptObject(f"{stored.key}: CRC32C {crc:08x}, the manifest says {stored.crc32c}")
