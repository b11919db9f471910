"""What the uploader's process does: real slabs, a directory or an S3 server, SIGKILL, a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.adapters.uploader import UploaderGone
from keepstep_worker.slab import parse
from tests.support.proxy import TcpProxy
from tests.support.s3 import bucket_store, s3_server
from tests.support.slabs import file_bytes, slab_bytes
from tests.support.uploading import (
    RUNTIME,
    WEIGHTS,
    bad,
    checkpoint,
    commit_command,
    content_of,
    good,
    names_locked,
    slab,
    started,
    until,
    upload,
)

pytestmark = pytest.mark.integration
server = pytest.fixture(scope="module")(s3_server)


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Where a store is, as the command `open` wants it."""
    if request.param == "directory":
        return {"store": str(tmp_path / "store")}
    endpoint, bucket = request.getfixturevalue("server"), f"b{uuid.uuid4().hex[:12]}"
    bucket_store(endpoint, bucket)
    return {"store": f"s3://{bucket}/below", "endpoint": endpoint}


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
            for rank in range(2):
                with slab(b"") as fd:
                    reply = await good(client, fd, command="fetch", manifest=manifest, rank=rank, world=3)
                    assert file_bytes(fd) == content_of(rank)
                assert (reply["step"], reply["size_bytes"]) == (7, size)
                assert reply["replicated"] == digest
                assert reply["local"] == measured[rank]["local"]
            with slab(b"") as fd:  # a rank that the two did not have: what has no mean is rank 0's
                reply = await good(client, fd, command="fetch", manifest=manifest, rank=2, world=3)
                found, stored = file_bytes(fd), content_of(0)
            assert (reply["step"], reply["replicated"]) == (7, digest)
            assert tensors_of(found) == tensors_of(stored)

    asyncio.run(run())


def tensors_of(file: bytes) -> dict[str, bytes]:
    return {key: file[place.begin : place.end] for key, place in parse(file, len(file))[0].items()}


def store_of(place: dict[str, str]) -> Any:
    if "endpoint" in place:
        bucket, _, prefix = place["store"].removeprefix("s3://").partition("/")
        return bucket_store(place["endpoint"], bucket, prefix, make=False)
    return DirectoryStore(Path(place["store"]))


def test_what_a_host_uploaded_it_reads_from_its_own_disk_when_it_starts_anew(place, tmp_path):
    async def run() -> None:
        local, store = str(tmp_path / "nvme"), store_of(place)
        async with started(**place, local=local) as client:
            manifest, objects = await checkpoint(client, 7)
        for each in objects:
            store.delete(each["key"])
        async with started(**place, local=local) as client:
            with slab(b"") as fd:
                await good(client, fd, command="fetch", manifest=manifest, rank=0, world=2)
                assert file_bytes(fd) == content_of(0)
        async with started(**place) as client:
            with slab(b"") as fd:
                error, _ = await bad(client, fd, command="fetch", manifest=manifest, rank=0, world=2)
                assert error == "missing"

    asyncio.run(run())


@pytest.mark.parametrize(
    "s3",
    [
        7,
        {"encryption": "kms"},
        {"encryption": "kms", "parts_in_flight": "many", "bytes_per_s": None},
        {"encryption": None, "parts_in_flight": 4, "bytes_per_s": None},
        {"encryption": "kms", "parts_in_flight": 4, "bytes_per_s": None, "colour": "red"},
    ],
)
def test_settings_that_can_not_be_are_refused(tmp_path, s3):
    async def run() -> None:
        async with started() as client:
            error, detail = await bad(client, command="open", job="job", store=str(tmp_path / "store"), s3=s3)
            assert error == "invalid" and detail.startswith("s3 ")

    asyncio.run(run())


def test_a_limited_upload_is_whole(place):
    s3 = {"encryption": "bucket", "parts_in_flight": 1, "bytes_per_s": 50e6}

    async def run() -> None:
        async with started(**place, s3=s3) as client:
            manifest, _ = await checkpoint(client, 7)
            with slab(b"") as fd:
                await good(client, fd, command="fetch", manifest=manifest, rank=1, world=2)
                assert file_bytes(fd) == content_of(1)

    asyncio.run(run())


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
            with open("/dev/null") as no_memory:
                error, detail = await bad(client, no_memory.fileno(), command="fetch", manifest=older, rank=0, world=2)
            assert error == "unavailable"
            assert "bytes of the slab" in detail
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
            assert (reply["manifests"], reply["objects"]) == (1, 6)
            for manifest, there in zip(manifests, (True, False, True), strict=True):
                with slab(b"") as fd:
                    reply = await client.call({"command": "fetch", "manifest": manifest, "rank": 0, "world": 2}, fd)
                assert reply["ok"] is there

    asyncio.run(run())


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
            swept = await good(client, command="sweep", keep_last=3, keep_every=0, generation=1, grace_s=0)
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
