"""The end of the job's runtime is known beforehand, and is an interruption like any other."""

from __future__ import annotations

import asyncio

from keepstep.adapters.clock import Clock
from keepstep.app.notices import watch_runtime
from keepstep.core.events import InterruptionNoticed
from keepstep.core.policy import Policy


def noticed(max_runtime: str, age_s: float) -> list[InterruptionNoticed]:
    policy = Policy.model_validate({"interruption": {"max_runtime": max_runtime, "grace": "100s"}})
    events: list[InterruptionNoticed] = []

    async def run() -> None:
        await watch_runtime(policy.interruption, age_s, Clock(), events.append)

    asyncio.run(run())
    return events


def test_it_is_noticed_with_the_grace_to_go():
    clock = Clock()
    before = clock.now()
    (event,) = noticed("1h", 3500.0 - 0.05)
    assert event.source == "max_runtime"
    assert before + 100.0 <= event.deadline <= clock.now() + 100.0


def test_an_agent_that_comes_late_has_what_is_left():
    clock = Clock()
    before = clock.now()
    (event,) = noticed("1h", 3590.0)
    assert before + 10.0 <= event.deadline <= clock.now() + 10.0


def test_an_end_that_is_not_known_is_none():
    assert noticed("off", 1e9) == []
