"""The uploader's process as the agent uses it: real slabs, a directory or an S3 server, SIGKILL, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.adapters.uploader import UploaderClient, UploaderGone
from tests.support.proxy import TcpProxy
from tests.support.s3 import CREDENTIALS, bucket_store, s3_server
from tests.support.slabs import file_bytes, memory_file, slab_bytes

pytestmark = pytest.mark.integration
server = pytest.fixture(scope="module")(s3_server)
RUNTIME = str(Path(__file__).parents[2] / "runtime")
WEIGHTS = os.urandom(3_000_001)


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Where a store is, as the command `open` wants it."""
    if request.param == "directory":
        return {"store": str(tmp_path / "store")}
    endpoint, bucket = request.getfixturevalue("server"), f"b{uuid.uuid4().hex[:12]}"
    bucket_store(endpoint, bucket)
    return {"store": f"s3://{bucket}/below", "endpoint": endpoint}


@contextlib.asynccontextmanager
async def started(
    python: str = sys.executable, on_exit: Callable[[int], None] | None = None, **place: str
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


def test_two_ranks_up_and_down_again(place):
    async def run() -> None:
        async with started(**place) as client:
            assert await good(client, command="head") == {"id": 2, "ok": True, "head": None, "unreadable": []}
            measured = []
            for rank in range(2):
                with slab(content_of(rank)) as fd:
                    size = len(content_of(rank))
                    measured.append(await good(client, fd, command="verify", slab=0, step=7, size_bytes=size))
            assert measured[0]["replicated"] == measured[1]["replicated"]
            assert measured[0]["local"] != measured[1]["local"]
            assert measured[0]["replicated_bytes"] == len(WEIGHTS)
            assert sum(measured[0][name] for name in ("head_bytes", "replicated_bytes", "local_bytes")) == size

            manifest, objects = await checkpoint(client, 7)
            assert sum(stored["size_bytes"] for stored in objects if stored["kind"] == "replicated") == len(WEIGHTS)
            head = (await good(client, command="head"))["head"]
            digest = measured[0]["replicated"]
            assert head == {"generation": 1, "step": 7, "manifest": manifest, "digest": digest, "run": "run"}

        async with started(**place) as client:  # another process, another day
            for rank in range(3):
                with slab(b"") as fd:
                    reply = await good(client, fd, command="fetch", manifest=manifest, rank=rank, world=3)
                    assert file_bytes(fd) == content_of(rank % 2)
                assert (reply["step"], reply["size_bytes"]) == (7, size)
                assert reply["replicated"] == digest
                assert reply["local"] == measured[rank % 2]["local"]

    asyncio.run(run())


def store_of(place: dict[str, str]) -> Any:
    if "endpoint" in place:
        bucket, _, prefix = place["store"].removeprefix("s3://").partition("/")
        return bucket_store(place["endpoint"], bucket, prefix, make=False)
    return DirectoryStore(Path(place["store"]))


def test_a_corrupt_object_is_found_and_an_older_checkpoint_taken(place):
    async def run() -> None:
        store = store_of(place)
        async with started(**place) as client:
            older, _ = await checkpoint(client, 7)
            newer, objects = await checkpoint(client, 8)
            key = objects[0]["key"]
            data = bytearray(b"".join(store.get(key)))
            data[1000] ^= 4
            store.put(key, bytes(data))
            with slab(b"") as fd:
                error, detail = await bad(client, fd, command="fetch", manifest=newer, rank=0, world=2)
            assert error == "corrupt"
            assert detail.startswith(key)
            head = (await good(client, command="head", without=[newer]))["head"]
            assert (head["generation"], head["step"], head["manifest"]) == (1, 7, older)
            with slab(b"") as fd:
                await good(client, fd, command="fetch", manifest=older, rank=0, world=2)
            store.delete(key)
            with slab(b"") as fd:
                error, detail = await bad(client, fd, command="fetch", manifest=newer, rank=0, world=2)
            assert error == "missing"
            assert key in detail

    asyncio.run(run())


def test_a_stale_generation_is_fenced_and_a_late_step_refused(place):
    async def run() -> None:
        async with started(**place) as stale, started(**place) as current:
            parts = [await upload(stale, rank, 8, generation=1) for rank in range(2)]
            late = [await upload(current, rank, 5, generation=2) for rank in range(2)]
            await checkpoint(current, 6, generation=2)
            before = await good(current, command="head")
            error, detail = await bad(stale, **commit_command(parts, 8, generation=1))
            assert (error, "generation 2" in detail) == ("fenced", True)
            assert (await bad(current, **commit_command(late, 5, generation=2)))[0] == "conflict"
            sweeping = {"command": "sweep", "keep_last": 1, "keep_every": 0, "generation": 1}
            assert (await bad(stale, **sweeping))[0] == "fenced"
            assert (await good(current, command="head"))["head"] == before["head"]
            assert (await bad(stale, **{**commit_command(parts, 9), "digest": "crc32c:00000000"}))[0] == "corrupt"

    asyncio.run(run())


def test_a_sweep_keeps_what_it_should(place):
    async def run() -> None:
        async with started(**place) as client:
            manifests = [(await checkpoint(client, step))[0] for step in (5, 6, 7)]
            reply = await good(client, command="sweep", keep_last=1, keep_every=5, generation=1)
            assert (reply["manifests"], reply["objects"]) == (1, 4)
            for manifest, there in zip(manifests, (True, False, True), strict=True):
                with slab(b"") as fd:
                    reply = await client.call({"command": "fetch", "manifest": manifest, "rank": 0, "world": 2}, fd)
                assert reply["ok"] is there

    asyncio.run(run())


@contextlib.contextmanager
def names_locked(root: Path) -> Iterator[None]:
    """Hold the lock under which a directory store changes names: a put can write, and can not finish."""
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_a_kill_in_mid_upload_leaves_head_as_it_was(tmp_path):
    async def run() -> None:
        root, exits = tmp_path / "store", []
        async with started(on_exit=exits.append, store=str(root)) as client:
            await checkpoint(client, 7)
            before = (await good(client, command="head"))["head"]
            with names_locked(root):
                going = asyncio.create_task(upload(client, 0, 8))
                await until(lambda: any((root / ".unfinished").iterdir()))
                content = content_of(1)
                with slab(content) as fd:  # and nothing waits behind it
                    await good(client, fd, command="verify", slab=1, step=8, size_bytes=len(content))
                assert not going.done()
                first = client.pid
                os.kill(first, signal.SIGKILL)
                with pytest.raises(UploaderGone):
                    await going
            await until(lambda: bool(exits))
            assert exits == [-signal.SIGKILL]
            with pytest.raises(UploaderGone):
                await client.call({"command": "head"})
            assert await client.start(environment={**os.environ, "PYTHONPATH": RUNTIME}) not in (first, None)
            await good(client, command="open", store=str(root), job="job")
            assert (await good(client, command="head"))["head"] == before
            assert len(list((root / ".unfinished").iterdir())) == 1
            swept = await good(client, command="sweep", keep_last=3, keep_every=0, grace_s=0)
            assert swept["unfinished"] == 1
            await checkpoint(client, 8)
            assert (await good(client, command="head"))["head"]["step"] == 8
        assert len(exits) == 2

    asyncio.run(run())


def test_a_kill_while_s3_takes_the_bytes_leaves_head_as_it_was(server):
    async def run() -> None:
        bucket = f"b{uuid.uuid4().hex[:12]}"
        bucket_store(server, bucket)
        host, _, port = server.removeprefix("http://").partition(":")
        with TcpProxy(host, int(port)) as proxy:
            async with started(store=f"s3://{bucket}", endpoint=proxy.endpoint) as client:
                await checkpoint(client, 7)
                before = (await good(client, command="head"))["head"]
                proxy.freeze()
                going = asyncio.create_task(upload(client, 0, 8))
                content = content_of(1)
                with slab(content) as fd:
                    await good(client, fd, command="verify", slab=1, step=8, size_bytes=len(content))
                assert not going.done()
                os.kill(client.pid, signal.SIGKILL)
                with pytest.raises(UploaderGone):
                    await going
        async with started(store=f"s3://{bucket}", endpoint=server) as client:
            assert (await good(client, command="head"))["head"] == before

    asyncio.run(run())


def test_a_store_that_is_away_at_first_is_opened_later(server):
    async def run() -> None:
        bucket = f"b{uuid.uuid4().hex[:12]}"
        bucket_store(server, bucket)
        host, _, port = server.removeprefix("http://").partition(":")
        with TcpProxy(host, int(port)) as proxy:
            proxy.cut()
            async with started() as client:
                opening = {"command": "open", "store": f"s3://{bucket}", "job": "job", "endpoint": proxy.endpoint}
                assert (await bad(client, **opening))[0] == "unavailable"
                assert (await bad(client, command="head"))[0] == "unavailable"
                proxy.restore()
                await checkpoint(client, 7)
                proxy.cut()
                assert (await bad(client, command="head"))[0] == "unavailable"
                proxy.restore()
                assert (await good(client, command="head"))["head"]["step"] == 7

    asyncio.run(run())


@pytest.fixture(params=["full", "limited"])
def cramped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A directory and a Python that can not write the whole slab there."""
    store = tmp_path / "cramped"
    store.mkdir()
    if request.param == "full":
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(store)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("mounting is not permitted here")
        try:
            yield str(store), sys.executable
        finally:
            subprocess.run(["umount", str(store)], check=True)
    else:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nulimit -f 1000\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        yield str(store), str(python)


def test_a_full_disk_is_refused_and_what_was_there_stays(cramped):
    store, python = cramped

    async def run() -> None:
        async with started(python, store=store) as client:
            small, content = slab_bytes({"replicated/w": b"1", "local/l": b"2"}), content_of(0)
            fields = {"command": "upload", "slab": 0, "generation": 1, "run": "run", "rank": 0, "world": 1}
            with slab(small) as fd:
                part = await good(client, fd, **fields, step=7, size_bytes=len(small))
            await good(client, **commit_command([part], 7))
            with slab(content) as fd:
                error, detail = await bad(client, fd, **fields, step=8, size_bytes=len(content))
            assert error == "refused"
            assert "No space left" in detail or "File too large" in detail
            assert (await good(client, command="head"))["head"]["step"] == 7
            assert list((Path(store) / ".unfinished").iterdir()) == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ({"store": "/proc/keepstep"}, "refused"),
        ({"store": "gs://bucket/x"}, "refused"),
        ({"store": "s3://"}, "refused"),
        ({"store": "s3://Not A Bucket", "endpoint": "http://127.0.0.1:9"}, "refused"),
        ({"store": "s3://bucket", "endpoint": "no url"}, "refused"),
        ({"store": "s3://bucket", "endpoint": "http://127.0.0.1:9"}, "unavailable"),
        ({"store": "/tmp/x", "job": "../x"}, "invalid"),
        ({"store": 7}, "invalid"),
        ({}, "invalid"),
    ],
)
def test_a_store_that_can_not_be_is_refused(place, error):
    async def run() -> None:
        async with started() as client:
            found, detail = await bad(client, **{"command": "open", "job": "job", **place})
            assert found == error
            assert detail

    asyncio.run(run())


@pytest.mark.parametrize(
    "command",
    [
        {},
        {"command": "dance"},
        {"command": "head"},
        {"command": "verify", "size_bytes": 10},
        {"command": "upload"},
        {"command": "commit", "objects": 5},
    ],
)
def test_what_can_not_be_asked_is_answered(command):
    async def run() -> None:
        async with started() as client:
            assert (await bad(client, **command))[0] == "invalid"

    asyncio.run(run())


def test_bad_fields_and_bad_slabs_are_answered(tmp_path):
    async def run() -> None:
        async with started(store=str(tmp_path / "store")) as client:
            with slab(b"no slab") as fd:
                for size in (0, 7, 100):
                    error, _ = await bad(client, fd, command="verify", slab=0, step=1, size_bytes=size)
                    assert error == "corrupt"
                assert (await bad(client, fd, command="verify", size_bytes="7"))[0] == "invalid"
                fields = {"command": "upload", "step": 1, "generation": 1, "run": "r", "world": 1, "size_bytes": 7}
                assert (await bad(client, fd, **fields, rank=1))[0] == "invalid"
                assert (await bad(client, fd, **fields, rank=0))[0] == "corrupt"
                assert (await bad(client, fd, **{**fields, "run": "a/b"}, rank=0))[0] == "invalid"
            assert (await bad(client, command="head", without="x"))[0] == "invalid"
            assert (await bad(client, command="sweep", keep_last=0, keep_every=0))[0] == "invalid"
            commit = {"command": "commit", "step": 1, "generation": 1, "run": "r", "world": 1, "digest": "x"}
            assert (await bad(client, **commit, objects=[]))[0] == "corrupt"
            assert (await bad(client, **commit, objects=[{}]))[0] == "corrupt"
            with slab(b"") as fd:
                fetch = {"command": "fetch", "manifest": "job/manifests/1-1-r.json", "rank": 0, "world": 1}
                assert (await bad(client, fd, **fetch))[0] == "missing"
            assert (await good(client, command="head"))["head"] is None

    asyncio.run(run())


def test_commands_and_replies_of_any_size_pass(tmp_path):
    async def run() -> None:
        async with started(store=str(tmp_path / "store")) as client:
            for length in (1, 60_000, 66_000, 3_000_000):
                error, detail = await bad(client, command="x" * length)
                assert (error, detail) == ("invalid", f"no command {'x' * length!r}")
            replies = await asyncio.gather(*(bad(client, command=f"{'y' * 60_000}{n}") for n in range(100)))
            assert [detail[-4:] for _, detail in replies] == [f"{n}'".rjust(4, "y") for n in range(100)]

    asyncio.run(run())


def test_a_call_that_is_given_up_does_not_disturb_the_next(tmp_path):
    async def run() -> None:
        root = tmp_path / "store"
        async with started(store=str(root)) as client:
            with names_locked(root):
                going = asyncio.create_task(upload(client, 0, 8))
                await until(lambda: any((root / ".unfinished").iterdir()))
                going.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await going
            await checkpoint(client, 8)

    asyncio.run(run())


PARENT = """
import asyncio
from keepstep.adapters.uploader import UploaderClient

async def run():
    client = UploaderClient()
    await client.start()
    await client.call({"command": "x"})
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_it_dies_with_its_parent(frozen):
    """Even where it can not notice: a stopped process sees no end of file, and is killed all the same."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": RUNTIME}
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        os.kill(parent.pid, signal.SIGKILL)
    try:
        asyncio.run(asyncio.wait_for(ended(pidfd), 30))
    finally:
        os.close(pidfd)


async def ended(pidfd: int) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    await over.wait()
    loop.remove_reader(pidfd)


def test_what_the_platform_or_the_terminal_sends_does_not_end_it(tmp_path):
    async def run() -> None:
        async with started(store=str(tmp_path / "store")) as client:
            pid = client.pid
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
            for sent in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, sent)
            await checkpoint(client, 8)
            assert client.pid == pid
            with pytest.raises(RuntimeError):
                await client.start()

    asyncio.run(run())


@pytest.mark.parametrize(("store", "loaded"), [("s3://bucket/below", "True"), ("{tmp_path}/store", "False")])
def test_boto3_is_loaded_only_for_s3(tmp_path, store, loaded):
    script = "import sys\nfrom keepstep.app.uploader import connect_store\n"
    script += "connect_store(sys.argv[1])\nprint('boto3' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", script, store.format(tmp_path=tmp_path)],
        env={**os.environ, **CREDENTIALS, "PYTHONPATH": RUNTIME},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == loaded
