"""Where the regions of a slab lie, read from its head. The slab is a safetensors file; keys name the class of state.

Layout: 8 bytes length N of the header (little-endian), N bytes of JSON, then the tensors' bytes without holes. Keys
begin with `replicated/` (these come first) or `local/`. Source: the safetensors format's description; types as there.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

HEADER_BYTES_MAX = 100_000_000
_PREFIX_BYTES = 8
_REPLICATED, _LOCAL = "replicated/", "local/"
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


class MalformedSlab(Exception):
    """A slab is not a safetensors file of keepstep's; the message says where it is wrong."""


@dataclass(frozen=True)
class SlabLayout:
    """The three regions of a slab, one behind the other."""

    head_bytes: int
    """The length field and the JSON."""
    replicated_bytes: int
    local_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.head_bytes + self.replicated_bytes + self.local_bytes


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
    if parse_head_bytes(head) != len(head):
        raise MalformedSlab(f"the head is {len(head)} bytes long and says {parse_head_bytes(head)}")
    try:
        header = json.loads(head[_PREFIX_BYTES:].decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise MalformedSlab(f"the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise MalformedSlab("the header is no JSON object")
    spans = sorted((*_span(name, entry), name) for name, entry in header.items() if name != "__metadata__")
    _check_metadata(header.get("__metadata__", {}))
    end, replicated_end = 0, 0
    for start, stop, name in spans:
        if start != end:
            raise MalformedSlab(f"{name} begins at {start}, and the tensor before it ends at {end}")
        end = stop
        if name.startswith(_REPLICATED) and stop > start:
            replicated_end = stop
    for start, stop, name in spans:
        if name.startswith(_LOCAL) and stop > start and start < replicated_end:
            raise MalformedSlab(f"{name} lies among the replicated tensors")
    return SlabLayout(len(head), replicated_end, end - replicated_end)


def read_layout(fd: int, size_bytes: int) -> SlabLayout:
    """Regions of the slab behind `fd`, which must be `size_bytes` long by its own head; the file may be longer.

    Raises:
        MalformedSlab: it is not.
    """
    head_bytes = parse_head_bytes(os.pread(fd, _PREFIX_BYTES, 0))
    if head_bytes > size_bytes:
        raise MalformedSlab(f"the head is {head_bytes} bytes long, the slab {size_bytes}")
    head = os.pread(fd, head_bytes, 0)
    if len(head) != head_bytes:
        raise MalformedSlab(f"the file ends within the head, at {len(head)} of {head_bytes} bytes")
    layout = parse_layout(head)
    if layout.size_bytes != size_bytes:
        raise MalformedSlab(f"the tensors end at byte {layout.size_bytes}, the slab at {size_bytes}")
    if os.fstat(fd).st_size < size_bytes:
        raise MalformedSlab(f"the file is {os.fstat(fd).st_size} bytes long, the slab {size_bytes}")
    return layout


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedSlab("__metadata__ must map strings to strings")


def _span(name: str, entry: object) -> tuple[int, int]:
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
    return start, stop


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
