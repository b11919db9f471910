"""Hearing from the metadata service that the host is being taken away, before the platform's signal comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from keepstep.adapters.clock import sleep
from keepstep.adapters.uploader import UploaderGone
from keepstep.core.events import Event, InterruptionNoticed
from keepstep.core.policy import Interruption

EVERY_S = 5.0
"""As often as AWS recommends."""
ABSENT_EVERY_S = 60.0
_MARGIN_S = 5.0
"""The host is gone by the time of the notice; by then all must be over."""


class Now(Protocol):
    def now(self) -> float: ...


class Asks(Protocol):
    async def ask(self, command: Mapping[str, object]) -> dict[str, Any]: ...


async def watch_notices(interruption: Interruption, uploader: Asks, clock: Now, post: Callable[[Event], None]) -> None:
    """Ask every few seconds and post each kind of notice once; that there is nobody to ask is normal."""
    wanted = {"spot", "rebalance"} & ({"spot" if name == "imds" else name for name in interruption.on})
    told: set[str] = set()
    pause_s = EVERY_S
    while wanted - told:
        await sleep(pause_s)  # first of all: what restarts a training has better use for these moments
        try:
            reply = await uploader.ask({"command": "notices"})
        except UploaderGone:
            continue
        pause_s = ABSENT_EVERY_S if reply.get("away") is not None else EVERY_S
        for source, deadline in _deadlines(reply, clock.now() + interruption.grace):
            if source in wanted - told:
                told.add(source)
                post(InterruptionNoticed(source, deadline))


def _deadlines(reply: Mapping[str, Any], latest: float) -> list[tuple[str, float]]:
    found = []
    if isinstance(reply.get("spot_at"), int | float):
        found.append(("spot", min(latest, float(reply["spot_at"]) - _MARGIN_S)))
    if reply.get("rebalance"):
        found.append(("rebalance", latest))
    return found
