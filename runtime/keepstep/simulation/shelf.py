"""What a simulated host keeps while its agent is dead."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.core import actions as a
from keepstep.core import events as e


@dataclass
class Shelf:
    """What outlives an agent: slabs (number to size), their seals, and init's view of the lease.

    `folder` is the number of the newest file that a silent script wrote. `rotten` and `diverged` are sequence numbers
    of seals: bytes that do not read back, bytes that no other host has.
    """

    slabs: dict[int, int] = field(default_factory=dict)
    seals: dict[int, e.SlabSeal] = field(default_factory=dict)
    rotten: set[int] = field(default_factory=set)
    diverged: set[int] = field(default_factory=set)
    deadline: float | None = None
    orders: a.WriteOrders | None = None
    seen_generation: int = 0
    folder: int = 0
