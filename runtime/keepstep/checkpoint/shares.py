"""Who uploads which bytes of what all ranks hold alike: equal contiguous ranges, one a rank."""

from __future__ import annotations

from keepstep.core.values import frozen


@frozen
class Share:
    """A contiguous range of the replicated region."""

    offset: int
    size_bytes: int


def assign_share(rank: int, world_size: int, size_bytes: int) -> Share:
    """Range that `rank` uploads. In rank order the ranges make up the region; their sizes differ by a byte at most.

    Raises:
        ValueError: no such rank, or a negative size.
    """
    if not 0 <= rank < world_size or size_bytes < 0:
        raise ValueError(f"rank {rank} of {world_size}, {size_bytes} bytes")
    start = size_bytes * rank // world_size
    return Share(start, size_bytes * (rank + 1) // world_size - start)
