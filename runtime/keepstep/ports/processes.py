"""Processes: what the outermost one does for those that may die before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class KeptDescriptor(Protocol):
    """A descriptor that an earlier agent had kept, and what it said of it."""

    @property
    def fd(self) -> int: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...


class Keeper(Protocol):
    """Holds descriptors while an agent is dead, and hands them to the next one."""

    async def keep(self, name: str, fd: int, meta: Mapping[str, Any] | None = None) -> None:
        """Hold a descriptor under a name; the caller's own stays the caller's."""
        ...

    async def drop(self, name: str) -> None:
        """Let a descriptor go."""
        ...
