"""What keeps descriptors for an agent in tests where no agent dies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KeepsNothing:
    """Keeps nothing: no agent dies here."""

    async def keep(self, name: str, fd: int, meta: Mapping[str, Any] | None = None) -> None:
        pass

    async def drop(self, name: str) -> None:
        pass
