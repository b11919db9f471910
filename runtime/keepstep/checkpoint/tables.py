"""The CRC32C of every tensor of a rank's slab, stored beside its objects; and which ranks hold which tensor otherwise.

A checkpoint is whole without its tables: no manifest names them. They say which tensor it was where two ranks' digests
of what they ought to hold alike differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from keepstep.checkpoint.digests import combine_crc32c, file_crc32c
from keepstep.checkpoint.keys import ManifestName, tensors_key
from keepstep.checkpoint.safetensors import StoredTensor
from keepstep.checkpoint.strict_json import MalformedDocument, parse_object, parse_version, write_canonical
from keepstep.ports.store import ObjectStore

VERSION = 1
TABLE_BYTES_MAX = 256 << 20

Table = Mapping[str, str]
"""CRC32C, eight hexadecimal digits, by key."""


class Sums:
    """CRCs of a file's tensors, and of ranges that go across them, with every byte read once."""

    def __init__(self, fd: int, head_bytes: int, tensors: Sequence[StoredTensor], cuts: Sequence[int]) -> None:
        """Read the tensors.

        Args:
            fd: the slab.
            head_bytes: where the tensors begin in it.
            tensors: in file order, without holes.
            cuts: where ranges that are asked for may begin or end, counted as the tensors' places are.

        Raises:
            ShortSlab: the file ends before.
        """
        self._pieces: list[tuple[int, int, int]] = []
        self.table: dict[str, str] = {}
        wanted = sorted(set(cuts))
        for tensor in tensors:
            inside = [cut for cut in wanted if tensor.start < cut < tensor.stop]
            bounds = [tensor.start, *inside, tensor.stop]
            parts = [(begin, end, file_crc32c(fd, head_bytes + begin, end - begin)) for begin, end in pairwise(bounds)]
            self._pieces += parts
            self.table[tensor.key] = f"{combine_crc32c((crc, end - begin) for begin, end, crc in parts):08x}"

    def of(self, begin: int, end: int) -> int:
        """CRC32C of a range, whose ends are tensors' ends or cuts."""
        return combine_crc32c((crc, e - b) for b, e, crc in self._pieces if begin <= b and e <= end)


def write_table(store: ObjectStore, job: str, name: ManifestName, rank: int, table: Table) -> None:
    """Put a rank's table; writing the same again changes nothing.

    Raises:
        StoreError: the store's own.
    """
    store.put(tensors_key(job, name, rank), write_canonical({"version": VERSION, "tensors": dict(table)}))


def read_table(store: ObjectStore, job: str, name: ManifestName, rank: int) -> Table:
    """A rank's table.

    Raises:
        NotFound: it has none.
        MalformedDocument: it is none of this version.
        StoreError: the store's own.
    """
    key = tensors_key(job, name, rank)
    data = store.read(key, TABLE_BYTES_MAX)
    parse_version(data, key, VERSION)
    tensors = parse_object(data, key, {"version": int, "tensors": dict})["tensors"]
    if not all(isinstance(crc, str) for crc in tensors.values()):
        raise MalformedDocument(f"{key}: a CRC32C that is no string")
    return dict(tensors)


def differing(store: ObjectStore, job: str, name: ManifestName, digests: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Ranks and tensors that are not as most ranks have them; where no more than half agree, all ranks are named.

    Args:
        store: where.
        job: whose.
        name: of which step.
        digests: of what all ranks ought to hold alike, as each has it, in rank order.

    Raises:
        NotFound, MalformedDocument: a table is lacking, or is none.
        StoreError: the store's own.
    """
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    most, *others = sorted(groups.values(), key=len, reverse=True)
    reference = _replicated(store, job, name, most[0])
    undecided = 2 * len(most) <= len(digests)
    found: set[tuple[int, str]] = set()
    for ranks in others:
        table = _replicated(store, job, name, ranks[0])  # those of one digest hold the same
        for key in {*reference, *table}:
            if reference.get(key) != table.get(key):
                found |= {(rank, key) for rank in (*ranks, *(most if undecided else ()))}
    return tuple(sorted(found))


def _replicated(store: ObjectStore, job: str, name: ManifestName, rank: int) -> Table:
    return {key: crc for key, crc in read_table(store, job, name, rank).items() if key.startswith("replicated/")}
