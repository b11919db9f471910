"""An uploader's process for tests, slabs to give it, and a directory store that can be held up."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.adapters.uploader import UploaderClient
from tests.support.s3 import CREDENTIALS
from tests.support.slabs import memory_file, slab_bytes

RUNTIME = str(Path(__file__).parents[2] / "runtime")
WEIGHTS = os.urandom(3_000_001)


@contextlib.asynccontextmanager
async def started(
    python: str = "", on_exit: Callable[[int], None] | None = None, **place: Any
) -> AsyncIterator[UploaderClient]:
    """An uploader with an open store."""
    client = UploaderClient(on_exit)
    await client.start(python, {**os.environ, **CREDENTIALS, "PYTHONPATH": RUNTIME})
    try:
        if place:
            await good(client, command="open", job="job", **place)
        yield client
    finally:
        await client.stop()
        assert client.pid is None


async def good(client: UploaderClient, fd: int | None = None, **command: Any) -> dict[str, Any]:
    reply = await asyncio.wait_for(client.call(command, fd), 60)
    assert reply["ok"], reply
    return reply


async def bad(client: UploaderClient, fd: int | None = None, **command: Any) -> tuple[str, str]:
    reply = await asyncio.wait_for(client.call(command, fd), 60)
    assert not reply["ok"], reply
    return reply["error"], reply["detail"]


def content_of(rank: int, weights: bytes = WEIGHTS) -> bytes:
    return slab_bytes({"replicated/w": weights, "local/seed": b"of rank %d" % rank * 1000})


@contextlib.contextmanager
def slab(content: bytes) -> Iterator[int]:
    fd = memory_file(content)
    try:
        yield fd
    finally:
        os.close(fd)


async def upload(client: UploaderClient, rank: int, step: int, generation: int = 1, world: int = 2) -> dict[str, Any]:
    content = content_of(rank)
    with slab(content) as fd:
        return await good(
            client, fd, command="upload", slab=0, step=step, generation=generation, run="run", rank=rank, world=world,
            size_bytes=len(content),
        )  # fmt: skip


def commit_command(parts: list[dict[str, Any]], step: int, generation: int = 1) -> dict[str, Any]:
    return {
        "command": "commit", "generation": generation, "step": step, "run": "run", "world": len(parts),
        "digest": parts[0]["replicated"], "objects": [stored for part in parts for stored in part["objects"]],
    }  # fmt: skip


async def checkpoint(client: UploaderClient, step: int, generation: int = 1) -> tuple[str, list[dict[str, Any]]]:
    parts = [await upload(client, rank, step, generation) for rank in range(2)]
    reply = await good(client, **commit_command(parts, step, generation))
    return reply["manifest"], [stored for part in parts for stored in part["objects"]]


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def names_locked(root: Path) -> Iterator[None]:
    """Hold the lock under which a directory store changes names: a put can write, and can not finish."""
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
