"""Standbys of a host as real processes: the first one makes the imports, the others are copies of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import keepstep_worker
from keepstep import kernel
from keepstep.adapters.processes import ExitStatus, LineSink, ProcessHost, WorkerSpec
from keepstep.app.standing_by import Standbys
from keepstep.core.actions import StartStandby
from keepstep.core.events import Event, StandbyGone, StandbyReady
from tests.support.fake_agent import DEADLINE_S, FakeAgent

pytestmark = pytest.mark.integration

COMMAND = (sys.executable, "-m", "keepstep_worker")
IMPORT = "import os\nos.write(2, b'imports\\n')\n"
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


class Host:
    """A host's standbys, the events that they make, and what its workers print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, [folder / "stdout", folder / "stderr"]
        self.files = [open(file, "wb", buffering=0) for file in self.printed]  # noqa: SIM115
        self.module = folder / "site" / "tensorflow" / "__init__.py"
        self.imports("")
        (folder / "script.py").write_text("import os, tensorflow\nprint(os.getpid(), os.getppid(), flush=True)")
        self.agent = FakeAgent()
        self.events: list[Event] = []
        self.exits: dict[str, ExitStatus] = {}
        self.gone: list[str] = []
        self.news = asyncio.Event()
        self.processes = ProcessHost(self._exited, sinks=tuple(LineSink(file.fileno()) for file in self.files))
        self.standbys = Standbys("algo-1", self._post, None)
        self.standbys.learn("w", {"kind": "imported", "module": "tensorflow", "file": str(self.module), "changes": {}})
        self.events.clear()

    def imports(self, more: str) -> None:
        """What the module does when it is imported: it says so."""
        self.module.parent.mkdir(parents=True, exist_ok=True)
        self.module.write_text(IMPORT + more)

    def _post(self, event: Event) -> None:
        self.events.append(event)
        self.news.set()

    def _exited(self, worker_id: str, status: ExitStatus) -> None:
        if self.standbys.exited(worker_id, str(status)):
            self.gone.append(worker_id)
        else:
            self.exits[worker_id] = status
        self.news.set()

    @property
    def env(self) -> dict[str, str]:
        path = f"{Path(keepstep_worker.__file__).parent.parent}:{self.folder / 'site'}"
        return {"PATH": os.environ["PATH"], "PYTHONPATH": path}

    def start(self, standby_id: str) -> None:
        worker = WorkerSpec("", (), self.env, "", cwd=str(self.folder))
        self.standbys.start(StartStandby(standby_id, COMMAND), worker, self.processes)

    async def until(self, there: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not there():
                self.news.clear()
                await self.news.wait()

    async def event(self, count: int = 1) -> Event:
        await self.until(lambda: len(self.events) >= count)
        return self.events[-1]

    async def runs(self, standby_id: str) -> tuple[str, str]:
        """What the worker that this standby becomes prints: its pid and its parent's; what it printed on import.

        Each stream has its order; which of the two comes first is not told.
        """
        endpoint, worker_id = self.agent.connect(), f"worker of {standby_id}"
        before = [file.stat().st_size for file in self.printed]
        env = self.env | self.agent.environment(endpoint)
        fds = (self.agent.wire_fd, endpoint.fileno())
        spec = WorkerSpec(worker_id, (*COMMAND, "script.py"), env, "", cwd=str(self.folder), pass_fds=fds)
        with endpoint:
            process = self.standbys.take(standby_id, spec, self.processes)
        assert process is not None
        await self.until(lambda: worker_id in self.exits)
        output, error = (file.read_text()[begin:] for file, begin in zip(self.printed, before, strict=True))
        assert str(self.exits[worker_id]) == "exit code 0", error
        return output.replace(f"{process.pid} {os.getpid()}", "pid agent"), error

    async def aclose(self) -> None:
        self.standbys.close()
        await self.processes.close()
        self.agent.close()
        for file in self.files:
            file.close()


WORKER = ("pid agent\n", "imports\n")


def children() -> set[int]:
    """Those that wait, where no worker runs."""
    return {pid for pid, each in kernel.processes().items() if each.parent == os.getpid() and each.session == pid}


def in_host(folder: Path, body: Callable[[Host], Awaitable[None]]) -> None:
    async def run() -> None:
        host = Host(folder)
        async with contextlib.aclosing(host):
            await body(host)

    asyncio.run(run())
    assert children() == set()


def test_what_one_has_imported_serves_all_that_come_after_it(tmp_path):
    async def body(host: Host) -> None:
        server: set[int] = set()
        for count, name in enumerate(["a", "b", "c"], 1):
            host.start(name)
            assert await host.event(count) == StandbyReady(name)
            if not server:
                host.imports("raise OSError('imported again')")
            assert len(children()) == 2
            assert await host.runs(name) == WORKER  # what was printed on import is printed by each
            server = server or children()
            assert children() == server

    in_host(tmp_path, body)


def test_one_that_is_needed_before_it_is_there_is_the_fork_server_itself(tmp_path):
    async def body(host: Host) -> None:
        host.start("a")
        assert await host.runs("a") == WORKER
        assert (host.events, children()) == ([], set())
        host.start("b")
        assert await host.event() == StandbyReady("b")
        host.start("c")
        assert await host.runs("c") == WORKER
        assert await host.runs("b") == WORKER

    in_host(tmp_path, body)


@pytest.mark.parametrize("dies", ["fork server", "copy"])
def test_what_dies_is_made_anew(tmp_path, dies):
    async def body(host: Host) -> None:
        host.start("a")
        (server,) = children()
        await host.event()
        (copy,) = children() - {server}
        if dies == "copy":
            os.kill(copy, signal.SIGKILL)
            assert await host.event(2) == StandbyGone("a", "signal 9")
            assert children() == {server}
        else:
            os.kill(server, signal.SIGKILL)
            await host.until(lambda: host.gone == ["a"])
            assert await host.runs("a") == WORKER
        host.start("b")
        assert await host.event(len(host.events) + 1) == StandbyReady("b")
        assert await host.runs("b") == WORKER

    in_host(tmp_path, body)


def test_what_can_not_be_copied_waits_itself(tmp_path):
    async def body(host: Host) -> None:
        host.imports(THREAD)
        for count, name in enumerate(["a", "b"], 1):
            host.start(name)
            assert await host.event(count) == StandbyReady(name)
            assert len(children()) == 1
            assert await host.runs(name) == WORKER
            assert children() == set()

    in_host(tmp_path, body)


def test_a_fork_server_whose_imports_were_of_no_use_goes(tmp_path):
    async def body(host: Host) -> None:
        host.start("a")
        await host.event()
        host.standbys.learn("w", {"kind": "unfit", "variables": ["TF_MODE"]})
        await host.until(lambda: len(children()) == 1)
        told = {"kind": "imported", "module": "tensorflow", "file": str(host.module), "changes": {"TF_MODE": "x"}}
        host.standbys.learn("w", told)
        host.start("b")
        assert await host.event(3) == StandbyReady("b")
        assert len(children()) == 3

    in_host(tmp_path, body)


async def copying(host: Host) -> int:
    """A fork server that can not make the copy it is to make, standby b; gives its pid."""
    host.start("a")
    (server,) = children()
    await host.event()
    os.kill(server, signal.SIGSTOP)
    host.start("b")
    return server


def test_while_a_copy_is_made_all_of_them_can_be_hung_up_on(tmp_path):
    async def body(host: Host) -> None:
        server = await copying(host)
        host.standbys.close()
        os.kill(server, signal.SIGCONT)
        await host.until(lambda: len(host.gone) == 2)
        assert [type(event) for event in host.events] == [StandbyReady]

    in_host(tmp_path, body)


def test_a_fork_server_that_dies_while_it_makes_a_copy_takes_that_one_with_it(tmp_path):
    async def body(host: Host) -> None:
        os.kill(await copying(host), signal.SIGKILL)
        await host.until(lambda: host.gone == ["a"])
        assert StandbyGone("b", "signal 9") in host.events
        assert await host.runs("a") == WORKER
        host.start("c")
        assert await host.event(len(host.events) + 1) == StandbyReady("c")
        assert await host.runs("c") == WORKER

    in_host(tmp_path, body)


def about(host: Host, standby_id: str) -> list[Event]:
    return [event for event in host.events if getattr(event, "standby_id", "") == standby_id]


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_is_of_no_use_while_it_makes_a_copy_stands_in_for_it_no_more(tmp_path, is_taken):
    async def body(host: Host) -> None:
        server = await copying(host)
        host.standbys.learn("w", {"kind": "unfit", "variables": ["TF_MODE"]})
        if is_taken:
            worker = WorkerSpec("worker of b", (*COMMAND, "script.py"), host.env, "")
            assert host.standbys.take("b", worker, host.processes) is None
        os.kill(server, signal.SIGCONT)
        await host.until(lambda: "a" in host.gone)
        host.start("c")
        await host.until(lambda: StandbyReady("c") in host.events)
        told = [StandbyReady("b")], [StandbyGone("b", "exit code 0")]  # as it is seen before its server's end, or after
        await host.until(lambda: is_taken or about(host, "b") in told)
        await host.until(lambda: len(children()) == 3 + (about(host, "b") == told[0]))

    in_host(tmp_path, body)
