"""What is heard of slabs before a snapshot is in one."""

from __future__ import annotations

from typing import Literal

from keepstep.core.values import frozen


@frozen
class LayoutAnnounced:
    """The state of a worker has this size; so much memory can be had beside what is in use, if that is known."""

    worker_id: str
    layout: int
    size_bytes: int
    room_bytes: int | None = None
    kind: Literal["layout_announced"] = "layout_announced"


@frozen
class SlabsLacking:
    """Memory for these slabs could not be had."""

    slabs: tuple[int, ...]
    detail: str
    kind: Literal["slabs_lacking"] = "slabs_lacking"
