"""A committed checkpoint read where it lies: its tensors, any range of a rank's slab, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.manifest import Manifest, StoredObject
from keepstep.checkpoint.receiving import receive
from keepstep.checkpoint.restore import STREAMS, CorruptObject, read_head_bytes
from keepstep.checkpoint.safetensors import MalformedSlab, StoredTensor, parse_layout, parse_tensors
from keepstep.core.values import frozen
from keepstep.ports.store import NotFound, ObjectStore

Told = Callable[[int], None]
"""Told of each number of bytes that was read."""


@frozen
class _Span:
    """Bytes of the slab from `begin` to `end`, which lie at `at` in an object."""

    begin: int
    end: int
    stored: StoredObject
    at: int


class StoredSlab:
    """The slab of one rank: a safetensors file whose bytes lie in several objects.

    Attributes:
        head: the file's first bytes.
        tensors: what it holds, in file order.
        size_bytes: length of the file.
    """

    def __init__(self, store: ObjectStore, manifest: Manifest, rank: int) -> None:
        """Read the head.

        Raises:
            CorruptObject: there is none, or it does not go with the manifest.
            StoreError: the store's own.
        """
        local = manifest.local(rank)
        self._store = store
        head_bytes = read_head_bytes(store, local)
        self.head = b"".join(store.get(local.key, 0, head_bytes))
        self.tensors = _tensors(local, self.head, manifest.replicated_bytes)
        self.size_bytes = local.size_bytes + manifest.replicated_bytes
        shares = [
            _Span(head_bytes + share.offset, head_bytes + share.offset + share.size_bytes, share, 0)
            for share in manifest.replicated()
        ]
        behind = head_bytes + manifest.replicated_bytes
        self._spans = [
            _Span(0, head_bytes, local, 0),
            *shares,
            _Span(behind, self.size_bytes, local, head_bytes),
        ]

    def read(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Deliver the bytes from `begin` up to `end`, or all that follow.

        Raises:
            CorruptObject: an object is shorter than the manifest says.
            StoreError: the store's own.
        """
        end = self.size_bytes if end is None else end
        for span in self._spans:
            first, last = max(begin, span.begin), min(end, span.end)
            if first < last:
                yield from self._part(span, first, last)

    def copy_to(self, write: Callable[[bytes], object], told: Told) -> None:
        """Deliver the whole file to `write`, in order, and see that every object is what the manifest says.

        Raises:
            CorruptObject: one is not; what was written is worth nothing then.
            StoreError: the store's own.
        """
        crcs: dict[StoredObject, int] = {}
        for span in self._spans:
            for piece in self._part(span, span.begin, span.end):
                crcs[span.stored] = crc32c(piece, crcs.get(span.stored, 0))
                write(piece)
                told(len(piece))
        for stored, crc in crcs.items():
            if f"{crc:08x}" != stored.crc32c:
                raise CorruptObject(f"{stored.key}: CRC32C {crc:08x}, the manifest says {stored.crc32c}")

    def _part(self, span: _Span, first: int, last: int) -> Iterator[bytes]:
        done = 0
        for piece in self._store.get(span.stored.key, span.at + first - span.begin, last - first):
            done += len(piece)
            yield piece
        if done != last - first:
            raise CorruptObject(f"{span.stored.key}: ends {last - first - done} bytes before it should")

    def digests(self, told: Told) -> dict[str, int]:
        """CRC32C of every tensor's bytes, by key; the slab is read once."""
        found: dict[str, int] = {}
        pieces, rest = self.read(len(self.head)), memoryview(b"")
        for tensor in self.tensors:
            crc, missing = 0, tensor.stop - tensor.start
            while missing:
                if not rest:
                    rest = memoryview(next(pieces))
                    told(len(rest))
                part, rest = rest[:missing], rest[missing:]
                crc, missing = crc32c(part, crc), missing - len(part)
            found[tensor.key] = crc
        return found


@frozen
class Difference:
    """What became of one tensor between two checkpoints: `added`, `removed`, `reshaped` or `changed`."""

    key: str
    what: str
    before: str
    after: str


def compare(before: StoredSlab, after: StoredSlab, told: Told) -> list[Difference]:
    """The tensors that are not the same in both, in the order of their keys."""
    old, new = ({tensor.key: tensor for tensor in slab.tensors} for slab in (before, after))
    was, now = before.digests(told), after.digests(told)
    found = []
    for key in sorted({**old, **new}):
        shapes = [describe(each[key]) if key in each else "" for each in (old, new)]
        if not shapes[0] or not shapes[1]:
            found.append(Difference(key, "removed" if shapes[0] else "added", *shapes))
        elif shapes[0] != shapes[1]:
            found.append(Difference(key, "reshaped", *shapes))
        elif was[key] != now[key]:
            found.append(Difference(key, "changed", f"crc32c:{was[key]:08x}", f"crc32c:{now[key]:08x}"))
    return found


def describe(tensor: StoredTensor) -> str:
    """Type and shape, as in `F32 [3, 4]`."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def verify(store: ObjectStore, manifest: Manifest, told: Told) -> list[str]:
    """Read every object of a checkpoint and say what is wrong with it; empty where nothing is.

    Raises:
        StoreError: the store's own, where it does not even say that an object is missing.
    """

    def check(stored: StoredObject) -> str:
        try:
            receive(store, stored, lambda piece, at: told(len(piece)))
            if stored.kind == "local":
                StoredSlab(store, manifest, stored.rank)
        except CorruptObject as error:
            return str(error)
        except NotFound:
            return f"{stored.key}: is gone"
        return ""

    with ThreadPoolExecutor(STREAMS, thread_name_prefix="verify") as streams:
        return [wrong for wrong in streams.map(check, manifest.objects) if wrong]


def _tensors(local: StoredObject, head: bytes, replicated_bytes: int) -> tuple[StoredTensor, ...]:
    try:
        layout, tensors = parse_layout(head), parse_tensors(head)
    except MalformedSlab as error:
        raise CorruptObject(f"{local.key}: {error}") from error
    if (layout.replicated_bytes, layout.head_bytes + layout.local_bytes) != (replicated_bytes, local.size_bytes):
        raise CorruptObject(f"{local.key}: its head does not describe the objects of this checkpoint")
    return tensors
