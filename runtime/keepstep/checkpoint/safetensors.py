"""Where the regions of a slab lie, read from its head. The slab is a safetensors file; keys name the class of state.

Layout: 8 bytes length N of the header (little-endian), N bytes of JSON, then the tensors' bytes without holes. Keys
begin with `replicated/` (these come first) or `local/`. Source: the safetensors format's description; types as there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, TypeGuard

from keepstep.core.values import frozen

HEADER_BYTES_MAX = 100_000_000
_PREFIX_BYTES = 8
_REPLICATED, _LOCAL = "replicated/", "local/"
_METADATA = "__metadata__"
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


class MalformedSlab(Exception):
    """A slab is not a safetensors file of keepstep's; the message says where it is wrong."""


@frozen
class SlabLayout:
    """The three regions of a slab, one behind the other."""

    head_bytes: int
    """The length field and the JSON."""
    replicated_bytes: int
    local_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.head_bytes + self.replicated_bytes + self.local_bytes


@frozen
class StoredTensor:
    """A tensor as a slab's head describes it; `start` and `stop` are bytes behind the head."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_local(self) -> bool:
        """Whether it belongs to one rank alone."""
        return self.key.startswith(_LOCAL)


def parse_head_bytes(prefix: bytes) -> int:
    """Length of a slab's head, from its first 8 bytes.

    Raises:
        MalformedSlab: the length can not be.
    """
    if len(prefix) < _PREFIX_BYTES:
        raise MalformedSlab(f"{len(prefix)} bytes are too few for a safetensors file")
    header_bytes = int.from_bytes(prefix[:_PREFIX_BYTES], "little")
    if not 2 <= header_bytes <= HEADER_BYTES_MAX:
        raise MalformedSlab(f"a header of {header_bytes} bytes can not be")
    return _PREFIX_BYTES + header_bytes


def parse_layout(head: bytes) -> SlabLayout:
    """Regions of the slab whose head (length field and JSON) is given.

    Raises:
        MalformedSlab: not a header, or tensors that overlap, leave holes, or lie in the wrong order.
    """
    return _layout_of(len(head), parse_tensors(head))


def parse_tensors(head: bytes) -> tuple[StoredTensor, ...]:
    """Tensors of the slab whose head is given, in file order: the replicated ones, then the local ones.

    Raises:
        MalformedSlab: as `parse_layout`.
    """
    header = _parse_header(head)
    _check_metadata(header.get(_METADATA, {}))
    tensors = [_tensor(name, entry) for name, entry in header.items() if name != _METADATA]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop, tensor.key))
    end, replicated_end = 0, 0
    for tensor in tensors:
        if tensor.start != end:
            raise MalformedSlab(f"{tensor.key} begins at {tensor.start}, and the tensor before it ends at {end}")
        end = tensor.stop
        if not tensor.is_local and tensor.stop > tensor.start:
            replicated_end = tensor.stop
    for tensor in tensors:
        if tensor.is_local and tensor.stop > tensor.start and tensor.start < replicated_end:
            raise MalformedSlab(f"{tensor.key} lies among the replicated tensors")
    return tuple(tensors)


def add_metadata(head: bytes, entries: Mapping[str, str]) -> bytes:
    """The same head with more metadata; where the tensors lie behind it stays as it is.

    Raises:
        MalformedSlab: it is no head.
    """
    header = _parse_header(head)
    _check_metadata(header.get(_METADATA, {}))
    header = {**header, _METADATA: {**header.get(_METADATA, {}), **entries}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


def read_layout(fd: int, size_bytes: int) -> SlabLayout:
    """Regions of the slab behind `fd`, which must be `size_bytes` long by its own head; the file may be longer.

    Raises:
        MalformedSlab: it is not.
    """
    return read_slab(fd, size_bytes)[0]


def read_slab(fd: int, size_bytes: int) -> tuple[SlabLayout, tuple[StoredTensor, ...]]:
    """The same, and the tensors.

    Raises:
        MalformedSlab: as `read_layout`.
    """
    head_bytes = parse_head_bytes(os.pread(fd, _PREFIX_BYTES, 0))
    if head_bytes > size_bytes:
        raise MalformedSlab(f"the head is {head_bytes} bytes long, the slab {size_bytes}")
    head = os.pread(fd, head_bytes, 0)
    if len(head) != head_bytes:
        raise MalformedSlab(f"the file ends within the head, at {len(head)} of {head_bytes} bytes")
    tensors = parse_tensors(head)
    layout = _layout_of(head_bytes, tensors)
    if layout.size_bytes != size_bytes:
        raise MalformedSlab(f"the tensors end at byte {layout.size_bytes}, the slab at {size_bytes}")
    if os.fstat(fd).st_size < size_bytes:
        raise MalformedSlab(f"the file is {os.fstat(fd).st_size} bytes long, the slab {size_bytes}")
    return layout, tensors


def _layout_of(head_bytes: int, tensors: tuple[StoredTensor, ...]) -> SlabLayout:
    end = tensors[-1].stop if tensors else 0
    replicated_end = max((t.stop for t in tensors if not t.is_local and t.stop > t.start), default=0)
    return SlabLayout(head_bytes, replicated_end, end - replicated_end)


def _parse_header(head: bytes) -> dict[str, Any]:
    if parse_head_bytes(head) != len(head):
        raise MalformedSlab(f"the head is {len(head)} bytes long and says {parse_head_bytes(head)}")
    try:
        header = json.loads(head[_PREFIX_BYTES:].decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise MalformedSlab(f"the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise MalformedSlab("the header is no JSON object")
    return header


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedSlab("__metadata__ must map strings to strings")


def _tensor(name: str, entry: object) -> StoredTensor:
    if not name.startswith((_REPLICATED, _LOCAL)):
        raise MalformedSlab(f"{name!r} begins with neither {_REPLICATED} nor {_LOCAL}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise MalformedSlab(f"{name}: dtype, shape and data_offsets are wanted")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise MalformedSlab(f"{name}: unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise MalformedSlab(f"{name}: shape and data_offsets must be lists of non-negative integers")
    start, stop = offsets
    if stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise MalformedSlab(f"{name}: {dtype} of shape {shape} does not fill {stop - start} bytes")
    return StoredTensor(name, dtype, tuple(shape), start, stop)


def _naturals(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
