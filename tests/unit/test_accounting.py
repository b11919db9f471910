"""A host's account goes from agent to agent and from attempt to attempt, whatever ends them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.clock import Clock
from keepstep.app import accounting
from keepstep.app.accounting import Accounting
from keepstep.core.goodput import Bucket


class Store:
    """Answers as the uploader does; nothing at all while it is deaf."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.is_deaf = False

    async def ask(self, command: Any) -> dict[str, Any]:
        if self.is_deaf:
            await asyncio.Event().wait()
        if command["command"] == "note":
            self.kept[command["place"]] = command["text"]
            return {"ok": True}
        return {"ok": True, "text": self.kept.get(command["place"])}


def an_account(folder: Path, memo: Any = None) -> Accounting:
    made = Accounting("algo-1", folder, Clock())
    made.begin(os.getpid(), memo or {})
    return made


def test_an_attempt_without_an_end_is_counted_up_to_the_last_note(tmp_path, monkeypatch):
    store = Store()

    async def play() -> dict[Bucket, float]:
        noted, turns = asyncio.Event(), iter(range(2))

        async def soon(seconds: float) -> None:
            if next(turns, None) is None:
                noted.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(accounting, "sleep", soon)
        first = an_account(tmp_path)
        for bucket in (Bucket.PRODUCTIVE, Bucket.IDLE):
            first.account = accounting.goodput.until(first.account, first.account.at + 5.0, bucket)
        keeping = asyncio.ensure_future(first.keep(store.ask))
        await noted.wait()
        keeping.cancel()
        second = an_account(tmp_path)
        await second.recall(store.ask)
        return second.earlier

    earlier = asyncio.run(play())
    assert earlier[Bucket.PRODUCTIVE] == pytest.approx(5.0)
    kept = json.loads(store.kept["goodput/algo-1.json"])
    assert sum(kept["seconds"].values()) == pytest.approx(kept["ended_at"] - kept["born_at"])


def test_nothing_is_kept_where_the_store_could_not_say_what_it_has(tmp_path, monkeypatch):
    store = Store()

    async def fails(command: Any) -> dict[str, Any]:
        return await store.ask(command) if command["command"] == "note" else {"ok": False}

    async def play() -> None:
        asked = 0

        async def soon(seconds: float) -> None:
            nonlocal asked
            asked += 1
            if asked > 2:
                raise TimeoutError

        monkeypatch.setattr(accounting, "sleep", soon)
        made = an_account(tmp_path)
        with pytest.raises(TimeoutError):
            await made.keep(fails)
        await made.remember(fails)
        assert store.kept == {}
        asked = 0
        with pytest.raises(TimeoutError):  # the store is well again
            await made.keep(store.ask)
        assert list(store.kept) == ["goodput/algo-1.json"]

    asyncio.run(play())


def test_what_a_former_agent_of_this_container_left_is_not_counted_twice(tmp_path):
    store = Store()

    async def play() -> tuple[dict[Bucket, float], dict[Bucket, float]]:
        store.kept["goodput/algo-1.json"] = json.dumps(
            {"seconds": {"restore": 3.0}, "earlier": {}, "born_at": 0.5, "ended_at": 1.0}
        )
        first = an_account(tmp_path)
        unsaid = {"account": first.memo()}
        await first.recall(store.ask)
        await first.remember(store.ask)
        second = an_account(tmp_path, unsaid)
        await second.recall(store.ask)
        return first.earlier, second.earlier

    first, second = asyncio.run(play())
    assert first == second


def test_an_agent_that_dies_before_the_store_has_answered_leaves_the_question_to_the_next(tmp_path):
    store = Store()
    store.kept["goodput/algo-1.json"] = json.dumps(
        {"seconds": {"restore": 3.0}, "earlier": {}, "born_at": 0.5, "ended_at": 1.0}
    )

    async def play() -> tuple[float, float]:
        first = an_account(tmp_path)
        store.is_deaf = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.recall(store.ask), 0.01)
        store.is_deaf = False
        second = an_account(tmp_path, {"account": first.memo()})
        assert await second.recall(store.ask)
        third = an_account(tmp_path, {"account": second.memo()})
        store.kept.clear()
        assert await third.recall(store.ask)  # it is known by now, and not asked for again
        return second.earlier[Bucket.RESTORE], third.earlier[Bucket.RESTORE]

    assert asyncio.run(play()) == (3.0, 3.0)
