"""A member started as planned serves; one that can not is told apart from one that is slow."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.adapters.etcd_member import EtcdNotReady, MemberSpec, find_etcd, plan_member, wait_until_healthy
from tests.support.ports import free_port

pytestmark = pytest.mark.integration


async def started(spec: MemberSpec) -> tuple[asyncio.subprocess.Process, asyncio.Event, asyncio.Task[None], str]:
    command = plan_member(find_etcd(), spec)
    with spec.log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command.argv, stdout=log, stderr=log, env=dict(command.env))
    ended = asyncio.Event()

    async def reap():
        await process.wait()
        ended.set()

    return process, ended, asyncio.create_task(reap()), command.endpoint


def member(folder: Path, name: str, client_port: int) -> MemberSpec:
    return MemberSpec(name, "127.0.0.1", client_port, free_port(), folder / name, folder / f"{name}.log", "t")


def test_a_planned_member_serves_and_a_second_on_its_port_does_not(tmp_path):
    async def scenario():
        port = free_port()
        process, ended, reaper, endpoint = await started(member(tmp_path, "one", port))
        try:
            await wait_until_healthy(endpoint, 60, ended)
            second = await started(member(tmp_path, "two", port))
            await asyncio.wait_for(second[2], 60)
            # The first one answers at this port, so look where the second would have been alone.
            with pytest.raises(EtcdNotReady, match="ended"):
                await wait_until_healthy(f"http://127.0.0.1:{free_port()}", 60, second[1])
            assert "address already in use" in (tmp_path / "two.log").read_text()
        finally:
            process.kill()
            await reaper

    asyncio.run(scenario())


def test_a_member_that_never_serves_runs_into_the_deadline():
    async def scenario():
        with pytest.raises(EtcdNotReady, match="does not serve"):
            await wait_until_healthy(f"http://127.0.0.1:{free_port()}", 0.3, asyncio.Event())

    asyncio.run(scenario())


def test_the_gpu_probe_is_a_program_of_its_own():
    runtime = Path(__file__).resolve().parents[2] / "runtime"
    shown = subprocess.run(
        [sys.executable, "-m", "keepstep.adapters.nvml", "--once"],
        env={"PYTHONPATH": str(runtime), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert shown.stdout.startswith('{"gpus":[')
    assert shown.stdout.count("\n") == 1
    assert shown.stderr == ""
