"""How the uploader's process is talked to, and when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.support.s3 import CREDENTIALS
from tests.support.uploading import RUNTIME, bad, checkpoint, good, names_locked, slab, started, until, upload

pytestmark = pytest.mark.integration


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
            assert (await bad(client, command="sweep", keep_last=0, keep_every=0, generation=1))[0] == "invalid"
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


def test_a_module_of_the_users_is_not_taken_for_one_of_the_agents(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('taken')")
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with started() as client:
            assert (await client.call({"command": "x"}))["error"] == "invalid"

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
    script = "import sys\nfrom keepstep.app.connecting import connect_store\n"
    script += "connect_store(sys.argv[1])\nprint('boto3' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", script, store.format(tmp_path=tmp_path)],
        env={**os.environ, **CREDENTIALS, "PYTHONPATH": RUNTIME},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == loaded
