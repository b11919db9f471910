"""Workers as real processes: their ends, their families, and every byte they print."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from keepstep import kernel
from keepstep.adapters.processes import ExitStatus, LineSink, ProcessHost, WorkerSpec
from keepstep.adapters.processes.output import LINE_BYTES_MAX
from tests.support.init_host import is_alive

pytestmark = pytest.mark.integration

PREFIX = "[algo-1 rank 0] "
WAIT_S = 60.0
OWN_GROUP = f"""{sys.executable} -c 'import os; os.setpgid(0, 0); os.execvp("sleep", ["sleep", "600"])'"""

either_way = pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "sigchld"])


class Workers:
    """A process host whose workers print into a file or a pipe, and the exits it reported."""

    def __init__(self, fd: int, pidfd: bool) -> None:
        self.sink = LineSink(fd)
        self.host = ProcessHost(self._exited, sinks=(self.sink, self.sink), pidfd=pidfd)
        self.exits: list[tuple[str, ExitStatus, int]] = []
        self._news = asyncio.Event()

    def _exited(self, worker_id: str, status: ExitStatus) -> None:
        size = os.fstat(self.sink.fd).st_size
        self.exits.append((worker_id, status, size))
        self._news.set()

    def python(self, code: str, worker_id: str = "w0", prefix: str = PREFIX, **more: object):
        argv = (sys.executable, "-c", "import os, signal, sys, time\n" + code)
        return self.host.start(WorkerSpec(worker_id, argv, dict(os.environ), prefix, **more))

    def shell(self, code: str, worker_id: str = "w0"):
        return self.host.start(WorkerSpec(worker_id, ("sh", "-c", code), dict(os.environ), PREFIX))

    async def ends(self, count: int = 1) -> list[tuple[str, ExitStatus]]:
        while len(self.exits) < count:
            self._news.clear()
            await self._news.wait()
        return [(worker_id, status) for worker_id, status, _ in self.exits]


Body = Callable[[Workers], Awaitable[None]]


def play(body: Body, fd: int, pidfd: bool = True) -> None:
    async def main() -> None:
        workers = Workers(fd, pidfd)
        try:
            async with asyncio.timeout(WAIT_S):
                await body(workers)
        finally:
            await workers.host.close()

    asyncio.run(main(), debug=True)


@pytest.fixture
def output(tmp_path: Path):
    with (tmp_path / "output").open("w+b") as file:
        file.path = tmp_path / "output"
        yield file


def noted(path: Path) -> int:
    return int(path.read_text())


@either_way
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", ExitStatus(0, None)),
        ("sys.exit(7)", ExitStatus(7, None)),
        ("print('no', file=sys.stderr); sys.exit(1)", ExitStatus(1, None, last_words="no\n")),
        ("os.kill(os.getpid(), signal.SIGKILL)", ExitStatus(None, signal.SIGKILL)),
        ("os.abort()", ExitStatus(None, signal.SIGABRT)),
    ],
)
def test_an_end_is_reported_once_with_its_code_or_signal(output, pidfd, code, status):
    async def body(workers: Workers) -> None:
        workers.python(code)
        assert await workers.ends() == [("w0", status)]
        await workers.host.stop("w0")  # it is gone: nothing to do
        workers.python("", worker_id="w1")
        assert await workers.ends(2) == [("w0", status), ("w1", ExitStatus(0, None))]

    play(body, output.fileno(), pidfd)


@either_way
def test_what_a_worker_prints_comes_before_the_news_of_its_end(output, pidfd):
    async def body(workers: Workers) -> None:
        workers.python("print('x' * 500_000); print('last words', end='', file=sys.stderr); os._exit(3)" * 1)
        await workers.ends()

    play(body, output.fileno(), pidfd)
    lines = output.path.read_bytes().splitlines(keepends=True)
    assert PREFIX.encode() + b"last words\n" in lines


def test_output_is_complete_when_the_end_is_reported(output):
    async def body(workers: Workers) -> None:
        workers.python("sys.stdout.write('0123456789\\n' * 200_000); sys.stdout.flush(); os._exit(0)")
        await workers.ends()
        assert workers.exits[0][2] == 200_000 * (11 + len(PREFIX))

    play(body, output.fileno())


def test_every_byte_of_every_kind_of_line_arrives(output):
    lines = [
        b"plain",
        b"",
        bytes(byte for byte in range(256) if byte != 10),
        b"m" * 1_000_000,
        b"\xff\xfe" * 100_000,
        b"end",
    ]
    source = output.path.with_name("source")
    source.write_bytes(b"\n".join(lines))

    async def body(workers: Workers) -> None:
        workers.shell(f"cat {source}")
        await workers.ends()

    play(body, output.fileno())
    assert output.path.read_bytes() == b"".join(PREFIX.encode() + line + b"\n" for line in lines)


def test_an_endless_line_goes_out_in_pieces(output):
    size_bytes = 2 * LINE_BYTES_MAX + 12_345

    async def body(workers: Workers) -> None:
        workers.python(f"sys.stdout.write('a' * {size_bytes}); sys.stdout.flush()")
        await workers.ends()

    play(body, output.fileno())
    pieces = output.path.read_bytes().splitlines()
    assert len(pieces) == 3
    assert all(piece.startswith(PREFIX.encode()) for piece in pieces)
    assert sum(len(piece) - len(PREFIX) for piece in pieces) == size_bytes


def test_a_flood_of_100_mb_arrives_whole(output):
    count = 1_000_000

    async def body(workers: Workers) -> None:
        workers.python(f"line = 'f' * 99 + '\\n'\nfor _ in range({count // 1000}): sys.stdout.write(line * 1000)")
        await workers.ends()

    play(body, output.fileno())
    assert output.path.stat().st_size == count * (100 + len(PREFIX))
    with output.path.open("rb") as read:
        assert set(read) == {PREFIX.encode() + b"f" * 99 + b"\n"}


def test_lines_of_several_workers_never_mix_in_a_pipe():
    read_fd, write_fd = os.pipe()
    received = bytearray()

    def read() -> None:
        while chunk := os.read(read_fd, 65_536):
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()

    async def body(workers: Workers) -> None:
        for rank in range(4):
            for_each = (
                f"line = '{rank}' * 3000 + '\\n'\nfor _ in range(300): sys.stdout.write(line); sys.stderr.write(line)"
            )
            workers.python(for_each, worker_id=f"w{rank}", prefix=f"[rank {rank}] ")
        await workers.ends(4)

    play(body, write_fd)
    os.close(write_fd)
    reader.join()
    os.close(read_fd)
    lines = bytes(received).splitlines()
    assert len(lines) == 4 * 600
    assert set(lines) == {f"[rank {rank}] ".encode() + str(rank).encode() * 3000 for rank in range(4)}


def test_a_reader_that_does_not_read_holds_up_the_worker_and_not_the_loop(tmp_path):
    read_fd, write_fd = os.pipe()
    size_bytes = 20 * 1024 * 1024
    done = tmp_path / "done"

    async def body(workers: Workers) -> None:
        worker = workers.python(f"sys.stdout.write(('y' * 1023 + '\\n') * {size_bytes // 1024}); open('{done}', 'w')")
        wait_channel = Path(f"/proc/{worker.pid}/wchan")
        while "pipe" not in wait_channel.read_text():  # the loop turns meanwhile
            await asyncio.sleep(0.01)
        workers.python("sys.exit(5)", worker_id="other")
        assert (await workers.ends())[0] == ("other", ExitStatus(5, None))
        assert not done.exists()
        total = await asyncio.to_thread(read_all, size_bytes + size_bytes // 1024 * len(PREFIX))
        assert (await workers.ends(2))[1] == ("w0", ExitStatus(0, None))
        assert total == size_bytes + size_bytes // 1024 * len(PREFIX)

    def read_all(wanted_bytes: int) -> int:
        total = 0
        while total < wanted_bytes:
            total += len(os.read(read_fd, 1 << 20))
        return total

    play(body, write_fd)
    os.close(read_fd)
    os.close(write_fd)


def test_a_reader_that_went_away_holds_up_nobody():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)

    async def body(workers: Workers) -> None:
        workers.python("sys.stdout.write('lost\\n' * 1_000_000); sys.stdout.flush(); os._exit(4)")
        assert await workers.ends() == [("w0", ExitStatus(4, None))]
        assert workers.sink.lost_bytes == 1_000_000 * (5 + len(PREFIX))

    play(body, write_fd)
    os.close(write_fd)


@either_way
def test_a_daemon_that_holds_the_pipe_delays_nothing_and_is_still_heard(output, tmp_path, pidfd):
    async def body(workers: Workers) -> None:
        workers.python(
            f"""
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open('{tmp_path}/daemon.new', 'w').write(str(os.getpid()))
    os.rename('{tmp_path}/daemon.new', '{tmp_path}/daemon')
    while not os.path.exists('{tmp_path}/go'):
        time.sleep(0.01)
    print('still here', flush=True)
    time.sleep(600)
os.wait()
while not os.path.exists('{tmp_path}/daemon'):
    time.sleep(0.01)
print('unfinished', end='', flush=True)
os._exit(0)
"""
        )
        await workers.ends()
        daemon = noted(tmp_path / "daemon")
        try:
            assert is_alive(daemon)
            assert output.path.read_bytes() == PREFIX.encode() + b"unfinished\n"
            (tmp_path / "go").touch()
            while b"still here\n" not in output.path.read_bytes():
                await asyncio.sleep(0.01)
        finally:
            os.kill(daemon, signal.SIGKILL)

    play(body, output.fileno(), pidfd)


@either_way
def test_stop_leaves_nothing_of_a_workers_family(output, tmp_path, pidfd):
    async def body(workers: Workers) -> None:
        worker = workers.shell(
            f"trap '' TERM INT; sleep 600 & setsid sleep 600 & echo $! > {tmp_path}/escaped;"
            f"{OWN_GROUP} & echo $! > {tmp_path}/own_group; echo up; while :; do sleep 1; done"
        )
        while b"up" not in output.path.read_bytes():
            await asyncio.sleep(0.01)
        await asyncio.gather(*(workers.host.stop("w0") for _ in range(3)))
        assert [status for _, status in await workers.ends()] == [ExitStatus(None, signal.SIGKILL)]
        assert not is_alive(worker.pid)
        assert not is_alive(noted(tmp_path / "escaped"))
        assert not is_alive(noted(tmp_path / "own_group"))
        while kernel.has_members(worker.pgid):  # zombies, until their new parent reaps them
            await asyncio.sleep(0.01)
        await workers.host.stop("w0")
        assert len(workers.exits) == 1

    play(body, output.fileno(), pidfd)


@either_way
def test_what_a_crashed_worker_left_in_its_session_is_killed(output, tmp_path, pidfd):
    async def body(workers: Workers) -> None:
        workers.shell(f"sleep 600 & echo $! > {tmp_path}/one; {OWN_GROUP} & echo $! > {tmp_path}/two; kill -9 $$")
        assert await workers.ends() == [("w0", ExitStatus(None, signal.SIGKILL))]
        for name in ("one", "two"):
            while is_alive(noted(tmp_path / name)):
                await asyncio.sleep(0.01)

    play(body, output.fileno(), pidfd)


def test_a_signal_reaches_the_group(output):
    async def body(workers: Workers) -> None:
        workers.python(
            "signal.signal(signal.SIGUSR1, lambda *_: os._exit(21)); print('up', flush=True); time.sleep(600)"
        )
        while b"up" not in output.path.read_bytes():
            await asyncio.sleep(0.01)
        workers.host.signal("w0", signal.SIGUSR1)
        assert await workers.ends() == [("w0", ExitStatus(21, None))]
        workers.host.signal("w0", signal.SIGUSR1)

    play(body, output.fileno())


def test_a_worker_gets_what_its_spec_says_and_no_more(output, tmp_path):
    slab = os.memfd_create("slab")
    other = os.memfd_create("other")
    os.set_inheritable(other, True)
    os.write(slab, b"sealed")
    wait = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\n"
    code = (
        f"print(os.pread({slab}, 9, 0), os.path.exists('/proc/self/fd/{other}'), os.getcwd(), os.environ.get('ONLY'),"
        "len(os.environ) < 5, open('/proc/self/oom_score_adj').read().strip(),"
        "os.getpgrp() == os.getpid() == os.getsid(0), os.read(0, 1))"
    )

    async def body(workers: Workers) -> None:
        command, more = (sys.executable, "-c", wait + code), {"pass_fds": (slab,), "oom_score_adj": 450}
        spec = WorkerSpec("w0", command, {"ONLY": "this"}, PREFIX, cwd=str(tmp_path), **more)
        worker = workers.host.start(spec)
        assert worker.pgid == worker.pid
        (tmp_path / "go").touch()  # its score is written from here
        assert await workers.ends() == [("w0", ExitStatus(0, None))]

    play(body, output.fileno())
    os.close(slab)
    os.close(other)
    score = min(1000, int(Path("/proc/self/oom_score_adj").read_text()) + 450)
    assert output.path.read_text() == f"{PREFIX}b'sealed' False {tmp_path} this True {score} True b''\n"


def left_behind(path: Path) -> tuple[tuple[list[str], int], ...]:
    """This process's descriptors and its number of threads, after a first and a second turn of the same."""

    async def body(workers: Workers) -> None:
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                workers.host.start(WorkerSpec("w0", ("/nonexistent/python",), {}, PREFIX))
        workers.python("")
        with pytest.raises(ValueError, match="w0 runs already"):
            workers.python("")
        await workers.ends()
        with pytest.raises(RuntimeError, match="main thread"):
            await asyncio.to_thread(workers.python, "", "w1")
        for turn in range(5):
            workers.python("print(1)", worker_id=f"again-{turn}")
            await workers.ends(2 + turn)

    found = []
    with path.open("w+b") as file:
        for _ in range(2):
            play(body, file.fileno())
            found.append((sorted(os.listdir("/proc/self/fd")), threading.active_count()))
    return tuple(found)


def test_what_can_not_be_started_leaves_no_descriptor_and_no_thread(tmp_path):
    # In a process of its own: what earlier tests opened in this one may be closed at any time.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = pool.submit(left_behind, tmp_path / "output").result()
    assert second == first


def test_close_stops_all_that_run(output):
    pids = []

    async def body(workers: Workers) -> None:
        pids.extend(workers.shell("sleep 600 & sleep 600", worker_id=f"w{rank}").pid for rank in range(3))

    play(body, output.fileno())
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids)
