"""A committed checkpoint back into a slab, every byte checked against the manifest on its way."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from keepstep.checkpoint.aggregate import Aggregation, CorruptObject
from keepstep.checkpoint.digests import combine_crc32c, file_crc32c, format_digest
from keepstep.checkpoint.exchange import BYTES_MIN, Exchange, Write
from keepstep.checkpoint.manifest import Manifest, StoredObject
from keepstep.checkpoint.peering import Peers
from keepstep.checkpoint.receiving import Ranges, at_last, receive
from keepstep.checkpoint.safetensors import MalformedSlab, parse_head_bytes, read_layout
from keepstep.core.values import frozen
from keepstep.ports.store import ObjectStore

__all__ = ["CorruptObject", "Fetched", "NoRoom", "fetch", "read_head_bytes"]

STREAMS = 4
"""Shares that are brought at the same time."""

_PREFIX_BYTES = 8
"""What a slab begins with: the length of its header."""


class NoRoom(Exception):
    """The slab's memory can not be had."""


@frozen
class Fetched:
    """The slab that was filled: its length, and digests of its regions as `verify` would give them."""

    size_bytes: int
    replicated: str
    local: str


def fetch(
    store: ObjectStore,
    manifest: Manifest,
    rank: int,
    fd: int,
    peers: Peers | None = None,
    exchange: Exchange | None = None,
) -> Fetched:
    """Fill an empty file with the slab of `rank`: the head, what all hold alike, and what the rank alone holds.

    A rank that the manifest's world did not have takes the aggregate of all ranks' local states: see
    `keepstep.checkpoint.aggregate`. What a world of another size finds is the same for each of its ranks otherwise.
    Memory is bounded in both cases; for an aggregate the local objects of all ranks are read and verified.
    What all hold alike comes from `peers` where they have it; else, where several hosts fetch, each of them reads a
    part of it (`exchange`). What a rank alone holds comes from the store always.

    Raises:
        CorruptObject: an object differs from what the manifest says in size or CRC, or makes up no slab.
        NotFound: an object is gone.
        NoRoom: no memory for the slab.
        StoreError: the store's own.
    """
    if rank < manifest.world_size:
        local = manifest.local(rank)
        size_bytes = local.size_bytes + manifest.replicated_bytes
        own = _OwnPart(fd, local, manifest.replicated_bytes)
        at_last(lambda: receive(store, local, own.place))
        head_bytes = own.head_bytes
    else:
        local = manifest.local(0)
        aggregation = Aggregation(store, [manifest.local(each) for each in range(manifest.world_size)])
        head_bytes = aggregation.head_bytes
        at = head_bytes + manifest.replicated_bytes
        size_bytes = at + aggregation.local_bytes
        for piece in aggregation.pieces():
            _write(fd, piece, at)
            at += len(piece)
        _write(fd, aggregation.head(), 0)

    def write(share: StoredObject, piece: bytes | memoryview, at: int) -> None:
        _write(fd, piece, head_bytes + share.offset + at)

    _receive_replicated(store, manifest, write, peers, exchange and _began(exchange, head_bytes))
    return _check(manifest, local, fd, size_bytes)


def _began(exchange: Exchange, head_bytes: int) -> Exchange:
    exchange.sharing.begins_at(head_bytes)
    return exchange


def _receive_replicated(
    store: ObjectStore, manifest: Manifest, write: Write, peers: Peers | None, exchange: Exchange | None
) -> None:
    """What all hold alike, each share from where it is nearest."""
    ranges = Ranges(store)
    streams = ThreadPoolExecutor(STREAMS, thread_name_prefix="fetch")

    def ask_peers(share: StoredObject) -> bool:
        brought = peers is not None and peers.bring(manifest, share, partial(write, share))
        if brought and exchange is not None:
            exchange.sharing.has(share.offset, share.size_bytes)
        return brought

    def ask_store(share: StoredObject) -> None:
        at_last(lambda: ranges.receive(share, partial(write, share)))
        if exchange is not None:
            exchange.sharing.has(share.offset, share.size_bytes)

    try:
        shares = manifest.replicated()
        brought = list(streams.map(ask_peers, shares)) if peers is not None else [False] * len(shares)
        left = [share for share, is_here in zip(shares, brought, strict=True) if not is_here]
        if exchange is not None and left and manifest.replicated_bytes >= BYTES_MIN:
            left = exchange.bring(manifest, left, ranges, write)
        list(streams.map(ask_store, left))
    finally:
        streams.shutdown(wait=True, cancel_futures=True)  # after the first that failed, the rest is of no use
        ranges.close()


def _check(manifest: Manifest, local: StoredObject, fd: int, size_bytes: int) -> Fetched:
    try:
        layout = read_layout(fd, size_bytes)
    except MalformedSlab as error:
        raise CorruptObject(f"{local.key}: {error}") from error
    if layout.replicated_bytes != manifest.replicated_bytes:
        raise CorruptObject(
            f"{local.key}: its head wants {layout.replicated_bytes} replicated bytes of {manifest.replicated_bytes}"
        )
    # What was written is what is in memory now: the shares' CRCs were checked while they passed.
    replicated = combine_crc32c((int(o.crc32c, 16), o.size_bytes) for o in manifest.replicated())
    local_at = layout.head_bytes + layout.replicated_bytes
    return Fetched(size_bytes, format_digest(replicated), format_digest(file_crc32c(fd, local_at, layout.local_bytes)))


class _OwnPart:
    """Puts a local object where it belongs: the head first, the local region behind the replicated one.

    Attributes:
        head_bytes: length of the head, once its first bytes have come.
    """

    def __init__(self, fd: int, local: StoredObject, replicated_bytes: int) -> None:
        self._fd, self._local, self._replicated_bytes = fd, local, replicated_bytes
        self._held = b""
        self.head_bytes = 0

    def place(self, piece: bytes, at: int) -> None:
        if at == 0:
            self._held, self.head_bytes = b"", 0
        if not self.head_bytes:
            self._held, at = self._held + piece, 0
            piece = self._held
            if len(piece) < min(_PREFIX_BYTES, self._local.size_bytes):
                return
            self.head_bytes = _head_bytes(piece[:_PREFIX_BYTES], self._local)
        in_head = max(0, min(len(piece), self.head_bytes - at))
        _write(self._fd, piece[:in_head], at)
        _write(self._fd, piece[in_head:], at + in_head + self._replicated_bytes)


def read_head_bytes(store: ObjectStore, local: StoredObject) -> int:
    """Length of the slab's head that a local object begins with.

    Raises:
        CorruptObject: it begins with none.
        StoreError: the store's own.
    """
    return _head_bytes(b"".join(store.get(local.key, 0, _PREFIX_BYTES)), local)


def _head_bytes(prefix: bytes, local: StoredObject) -> int:
    try:
        head_bytes = parse_head_bytes(prefix)
    except MalformedSlab as error:
        raise CorruptObject(f"{local.key}: {error}") from error
    if head_bytes > local.size_bytes:
        raise CorruptObject(f"{local.key}: a head of {head_bytes} bytes in an object of {local.size_bytes}")
    return head_bytes


def _write(fd: int, piece: bytes | memoryview, at: int) -> None:
    view = memoryview(piece)
    while view:
        try:
            written = os.pwrite(fd, view, at)
        except OSError as error:
            raise NoRoom(f"{len(view)} bytes of the slab: {error.strerror}") from error
        view, at = view[written:], at + written
