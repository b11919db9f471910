"""A rank's part of a checkpoint: its share of what all hold alike, and what it alone holds."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.checkpoint.digests import combine_crc32c, file_chunks, file_crc32c, format_digest, parallel_crc32c
from keepstep.checkpoint.keys import ManifestName, local_key, replicated_key
from keepstep.checkpoint.manifest import LOCAL, REPLICATED, StoredObject
from keepstep.checkpoint.safetensors import SlabLayout, read_layout, read_slab
from keepstep.checkpoint.shares import assign_share
from keepstep.checkpoint.tables import Sums, write_table
from keepstep.core.values import frozen
from keepstep.ports.store import ObjectStore


@frozen
class SlabDigests:
    """What a slab holds, region by region, as digests that can be compared."""

    layout: SlabLayout
    replicated: str
    local: str


@frozen
class UploadOrder:
    """Which part of which checkpoint to upload."""

    job: str
    name: ManifestName
    rank: int
    world_size: int
    size_bytes: int
    """Length of the slab."""


@frozen
class Uploaded:
    """What lies in the store now, and the digest of the whole replicated region, of which a share was uploaded."""

    objects: tuple[StoredObject, ...]
    replicated: str

    @property
    def size_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self.objects)


@frozen
class FileRanges:
    """Parts of a file put one behind the other, read as they are asked for."""

    fd: int
    ranges: tuple[tuple[int, int], ...]
    """(start, size) in bytes."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.ranges)

    def __iter__(self) -> Iterator[bytes]:
        for start, size in self.ranges:
            yield from file_chunks(self.fd, start, size)


def measure_slab(fd: int, size_bytes: int) -> SlabDigests:
    """Read a slab whole and say what it holds.

    Raises:
        MalformedSlab, ShortSlab: it is no slab of this length.
    """
    layout = read_layout(fd, size_bytes)
    local_at = layout.head_bytes + layout.replicated_bytes
    return SlabDigests(
        layout,
        format_digest(parallel_crc32c(fd, layout.head_bytes, layout.replicated_bytes)),
        format_digest(parallel_crc32c(fd, local_at, layout.local_bytes)),
    )


def upload(store: ObjectStore, fd: int, order: UploadOrder) -> Uploaded:
    """Put a rank's objects and the table of its tensors; uploading the same again overwrites them with the same bytes.

    Raises:
        MalformedSlab, ShortSlab: the file is no slab of this length.
        ChecksumMismatch: the slab changed while it was read.
        StoreError: the store's own.
    """
    layout, tensors = read_slab(fd, order.size_bytes)
    share = assign_share(order.rank, order.world_size, layout.replicated_bytes)
    share_at, share_end = layout.head_bytes + share.offset, share.offset + share.size_bytes
    sums = Sums(fd, layout.head_bytes, tensors, (share.offset, share_end))
    share_crc, replicated_crc = sums.of(share.offset, share_end), sums.of(0, layout.replicated_bytes)
    local_at = layout.head_bytes + layout.replicated_bytes
    local_crc = combine_crc32c(
        [
            (file_crc32c(fd, 0, layout.head_bytes), layout.head_bytes),
            (sums.of(layout.replicated_bytes, layout.replicated_bytes + layout.local_bytes), layout.local_bytes),
        ]
    )
    share_ranges = FileRanges(fd, ((share_at, share.size_bytes),))
    local_ranges = FileRanges(fd, ((0, layout.head_bytes), (local_at, layout.local_bytes)))
    share_key = replicated_key(order.job, order.name, order.rank, order.world_size)
    own_key = local_key(order.job, order.name, order.rank)
    store.put(share_key, share_ranges, crc32c=share_crc)
    store.put(own_key, local_ranges, crc32c=local_crc)
    write_table(store, order.job, order.name, order.rank, sums.table)
    return Uploaded(
        (
            StoredObject(share_key, REPLICATED, order.rank, share.offset, share.size_bytes, f"{share_crc:08x}"),
            StoredObject(own_key, LOCAL, order.rank, 0, local_ranges.size_bytes, f"{local_crc:08x}"),
        ),
        format_digest(replicated_crc),
    )
