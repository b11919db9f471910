"""What is asked of a store while the uploader comes and goes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from keepstep.adapters.uploader import UploaderGone
from keepstep.app import storing
from keepstep.app.storing import Storing
from keepstep.intake.policy import load_policy


class Uploader:
    """Stands in for the client: dies once, when it is first asked for something; who waits learns it before others."""

    def __init__(self, on_died):
        self.on_died, self.running, self.asked = on_died, False, []

    async def start(self):
        self.running = True

    async def stop(self):
        self.running = False

    async def call(self, command, fd=None):
        self.asked.append(command["command"] if self.running else "nobody")
        if not self.running:
            raise UploaderGone("the uploader is not running")
        if self.asked.count("recall") == 1 and command["command"] == "recall":
            self.running = False
            asyncio.get_running_loop().call_soon(self.on_died, 9)
            raise UploaderGone("the uploader ended before it answered")
        return {"ok": True}


@pytest.fixture
def uploader(monkeypatch):
    made = []

    async def at_once(seconds):
        await asyncio.sleep(0)

    monkeypatch.setattr(storing, "UploaderClient", lambda on_died: made.append(Uploader(on_died)) or made[0])
    monkeypatch.setattr(storing, "sleep", at_once)
    return made


def test_a_question_waits_for_the_next_uploader_where_one_dies(uploader):
    async def ask():
        asked = Storing("job", "s3://bucket", load_policy("default"), lambda _: None, lambda _: None)
        running = asyncio.create_task(asked.run())
        reply = await asked.ask_store({"command": "recall"})
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return reply

    assert asyncio.run(ask()) == {"ok": True}
    assert uploader[0].asked == ["open", "recall", "open", "recall"]


def test_without_a_store_nobody_is_asked(uploader):
    async def ask():
        asked = Storing("job", None, load_policy("default"), lambda _: None, lambda _: None)
        assert not asked.has_store
        question = asyncio.create_task(asked.ask_store({"command": "recall"}))
        await asyncio.sleep(0)
        question.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await question

    asyncio.run(ask())
    assert uploader[0].asked == []
