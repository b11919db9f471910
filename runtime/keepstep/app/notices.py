"""Knowing that the host is taken away before the platform's signal comes: by the metadata service, and by the clock."""

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


async def watch_runtime(interruption: Interruption, age_s: float, clock: Now, post: Callable[[Event], None]) -> None:
    """Post the end of the job's runtime, where that is known, with as much time left as any interruption gives.

    Args:
        interruption: the policy's word.
        age_s: how long the container has run.
        clock: gives unix seconds.
        post: takes the event.
    """
    if interruption.max_runtime is None:
        return
    left_s = interruption.max_runtime - age_s
    ends_at = clock.now() + left_s
    await sleep(max(0.0, left_s - interruption.grace))
    post(InterruptionNoticed("max_runtime", ends_at))


def _deadlines(reply: Mapping[str, Any], latest: float) -> list[tuple[str, float]]:
    found = []
    if isinstance(reply.get("spot_at"), int | float):
        found.append(("spot", min(latest, float(reply["spot_at"]) - _MARGIN_S)))
    if reply.get("rebalance"):
        found.append(("rebalance", latest))
    return found
