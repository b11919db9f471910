"""What is asked of a store while the uploader comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from keepstep.adapters.uploader import UploaderGone
from keepstep.app import storing
from keepstep.app.storing import Storing
from keepstep.core.actions import FetchSnapshot, ReadHead
from keepstep.core.causes import FailureCause
from keepstep.core.codec import encode_charges
from keepstep.core.events import HeadRead, OperationFailed
from keepstep.core.failures import Charges, LedgerEntry
from keepstep.intake.policy import load_policy
from keepstep_worker.wire import Seal


class Uploader:
    """Stands in for the client: dies once, when it is first asked for something; who waits learns it before others."""

    def __init__(self, on_died):
        self.on_died, self.running, self.asked = on_died, False, []

    async def start(self):
        self.running = True

    async def stop(self):
        self.running = False

    async def call(self, command, fd=None):
        if command["command"] != "ping":
            self.asked.append(command["command"] if self.running else "nobody")
        if not self.running:
            raise UploaderGone("the uploader is not running")
        if self.asked.count("recall") == 1 and command["command"] == "recall":
            self.running = False
            asyncio.get_running_loop().call_soon(self.on_died, 9)
            raise UploaderGone("the uploader ended before it answered")
        return {"ok": True, "size_bytes": 0, "step": 40, "replicated": "d40", "brought": {}, "trouble": []}


async def others():
    """Let all others have a turn."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_soon(passed.set)
    await passed.wait()


@pytest.fixture
def uploader(monkeypatch):
    made = []

    async def at_once(seconds):
        await others()

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

    assert asyncio.run(ask())["ok"]
    assert uploader[0].asked == ["open", "recall", "open", "recall"]


def test_without_a_store_nobody_is_asked(uploader):
    async def ask():
        asked = Storing("job", None, load_policy("default"), lambda _: None, lambda _: None)
        assert not asked.has_store
        question = asyncio.create_task(asked.ask_store({"command": "recall"}))
        await others()
        question.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await question

    asyncio.run(ask())
    assert uploader[0].asked == []


class Link:
    """Stands in for the worker's line: notes what is done to slabs and seals."""

    def __init__(self, has_worker):
        self.has_worker, self.done = has_worker, []

    async def adopt(self, slab, fd, size_bytes):
        self.done.append("adopt")
        os.close(fd)

    async def drop(self, slab):
        self.done.append("drop")

    def seal(self, slab, step, size_bytes, generation, now_ns):
        self.done.append("seal")
        return Seal(slab, step, 1, size_bytes, 0, generation, now_ns)


@pytest.mark.parametrize(
    ("has_worker", "done", "kind"),
    [(False, ["adopt", "seal"], "snapshot_fetched"), (True, ["adopt", "drop"], "snapshot_unwanted")],
)
def test_what_is_fetched_is_sealed_only_while_no_worker_counts_seals(uploader, has_worker, done, kind):
    """A worker goes on from the sequence it found: two seals of one number, and its snapshots are never seen again."""
    posted, link = [], Link(has_worker)

    async def fetch():
        storing_ = Storing("job", "s3://bucket", load_policy("default"), posted.append, lambda _: None)
        running = asyncio.create_task(storing_.run())
        while not uploader[0].running:
            await others()
        await storing_.fetch(FetchSnapshot("fetch:x", "manifests/40", 0, 0, 2, ()), link)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(fetch())
    assert link.done == done
    assert [(event.kind, event.operation) for event in posted] == [(kind, "fetch:x")]


KEPT = Charges(3, (LedgerEntry(12.5, FailureCause.KILLED, "killed", 40),))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"ok": True, "text": encode_charges(KEPT)}, [HeadRead("head", None, charges=KEPT)]),
        ({"ok": True, "text": None}, [HeadRead("head", None, charges=Charges())]),
        ({"ok": True, "text": '{"restarts": "many"}'}, [HeadRead("head", None, charges=Charges())]),
        ({"ok": False, "error": "corrupt", "detail": "CRC"}, [HeadRead("head", None, charges=Charges())]),
        ({"ok": False, "error": "unavailable", "detail": "503"}, [OperationFailed("head", "unavailable: 503", 2.0)]),
    ],
    ids=["kept", "nothing there", "not ours", "not whole", "store away"],
)
def test_what_earlier_attempts_were_charged_with_comes_with_head(monkeypatch, answer, found):
    posted, logged = [], []

    async def call(self, command, fd=None):
        return answer if command["command"] == "recall" else {"ok": True, "head": None}

    monkeypatch.setattr(storing.UploaderClient, "call", call)
    asked = Storing("job", "s3://bucket", load_policy("default"), posted.append, logged.append)
    asyncio.run(asked.read_head(ReadHead("head", ())))
    assert posted == found
    assert [line for line in logged if "do not count" in line] == logged
    assert len(logged) == (answer.get("text") == '{"restarts": "many"}' or answer.get("error") == "corrupt")


def test_a_generation_that_is_not_the_first_does_not_ask_for_them(monkeypatch):
    posted, asked = [], []

    async def call(self, command, fd=None):
        asked.append(command["command"])
        return {"ok": True, "head": None}

    monkeypatch.setattr(storing.UploaderClient, "call", call)
    one = Storing("job", "s3://bucket", load_policy("default"), posted.append, lambda _: None)
    asyncio.run(one.read_head(ReadHead("head", (), claim=2, run="r")))
    assert asked == ["head"] and posted == [HeadRead("head", None)]
