"""The agent's end of the line, with a real init at the other."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.adapters.init_link import InitLink, InitLinkError
from tests.support.init_host import Host, is_alive

pytestmark = pytest.mark.integration

AGENT = """
from keepstep.adapters.init_link import InitLink

async def agent(link, fenced, exited, signals):
{body}

async def main():
    link = InitLink.from_environment(os.environ)
    fenced, exited, signals = asyncio.Queue(), asyncio.Queue(), asyncio.Queue()
    link.listen(
        on_fenced=lambda: fenced.put_nowait(1),
        on_companion_exited=lambda name, status: exited.put_nowait((name, status)),
    )
    link.listen_signals(signals.put_nowait)
    async with asyncio.timeout(30):
        code = await agent(link, fenced, exited, signals)
    link.close()
    return code

sys.exit(asyncio.run(main(), debug=True))
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    left = host.left()
    host.clean_up()
    assert left == [], host.output()


def start(host: Host, body: str) -> int:
    return host.start(AGENT.format(body=textwrap.indent(textwrap.dedent(body), "    ")))


def test_a_companion_survives_the_agent_and_dies_with_init(host):
    start(
        host,
        """
        command = ["sh", "-c", "echo $COLOUR; sleep 600 & sleep 600"]
        pid = await link.companion("etcd", command, {"COLOUR": "blue"}, str(here / "log"))
        if link.state.boot == 0:
            note("first", pid)
            while not (here / "log").exists() or "blue" not in (here / "log").read_text():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        note("second", [pid, dict(link.state.companions), exited.qsize()])
        return 5
        """,
    )
    assert host.exit_code() == 5, host.output()
    first = int(host.noted("first"))
    assert json.loads(host.noted("second")) == [first, {"etcd": first}, 0]
    assert (host.folder / "log").read_text().splitlines().count("blue") == 1
    assert not is_alive(first)


def test_the_end_of_a_companion_is_reported(host):
    start(
        host,
        """
        await link.companion("code", ["sh", "-c", "exit 9"])
        first = await exited.get()
        await link.companion("missing", ["/nonexistent/etcd"])
        second = await exited.get()
        await link.companion("gentle", ["sleep", "600"])
        await link.stop_companion("gentle")
        third = await exited.get()
        await link.companion("stubborn", ["sh", "-c", "trap '' TERM; echo > $HERE/trapped; while :; do sleep 1; done"])
        while not (here / "trapped").exists():
            await asyncio.sleep(0.01)
        await link.stop_companion("stubborn", grace_s=0.1)
        fourth = await exited.get()
        note("ends", [first, second, third, fourth])
        return 0
        """,
    )
    assert host.exit_code() == 0, host.output()
    ends = [["code", 9], ["missing", 127], ["gentle", -signal.SIGTERM], ["stubborn", -signal.SIGKILL]]
    assert json.loads(host.noted("ends")) == ends


def test_two_who_ask_for_one_companion_get_the_same(host):
    start(
        host,
        """
        pids = await asyncio.gather(*(link.companion("etcd", ["sleep", "600"]) for _ in range(3)))
        return 0 if len(set(pids)) == 1 else 1
        """,
    )
    assert host.exit_code() == 0, host.output()


def test_what_the_agent_hands_over_comes_back_and_is_not_inherited(host):
    start(
        host,
        """
        if link.state.boot == 0:
            slab = os.memfd_create("slab")
            os.write(slab, b"sealed")
            await link.keep("slab/0", slab, {"step": 7})
            await link.keep("slab/1", slab)
            await link.drop("slab/1")
            await link.memo({"lease": 12})
            os._exit(70)
        kept = link.state.kept["slab/0"]
        leaked = subprocess.run(["sh", "-c", f"test -e /proc/self/fd/{kept.fd}"], close_fds=False).returncode == 0
        content = os.pread(kept.fd, 9, 0).decode()
        note("state", [sorted(link.state.kept), dict(kept.meta), content, dict(link.state.memo)])
        return 1 if leaked else 0
        """,
    )
    assert host.exit_code() == 0, host.output()
    assert json.loads(host.noted("state")) == [["slab/0"], {"step": 7}, "sealed", {"lease": 12}]


def test_a_passed_deadline_is_told_and_kills_the_group(host):
    start(
        host,
        """
        gone = subprocess.Popen(["true"], start_new_session=True)
        await link.group(gone.pid)
        gone.wait()
        await link.ungroup(gone.pid)
        worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
        await link.group(worker.pid)
        await link.deadline(time.monotonic() + 0.1)
        await fenced.get()
        return 0 if worker.wait() == -signal.SIGKILL else 1
        """,
    )
    assert host.exit_code() == 0, host.output()


def test_signals_arrive_in_the_loop_also_those_of_an_earlier_agent(host):
    init = start(
        host,
        """
        if link.state.boot == 0:
            note("ready", 1)
            if await signals.get() == signal.SIGTERM:
                os._exit(70)
        note("again", await signals.get())
        return 100 + await signals.get()
        """,
    )
    host.noted("ready")
    os.kill(init, signal.SIGTERM)
    assert int(host.noted("again")) == signal.SIGTERM
    os.kill(init, signal.SIGUSR1)
    assert host.exit_code() == 100 + signal.SIGUSR1


def test_a_burst_waits_for_an_init_that_does_not_read_and_loses_nothing(host):
    init = start(
        host,
        """
        if link.state.boot == 1:
            return link.state.memo["turn"] % 256
        os.kill(os.getppid(), signal.SIGSTOP)
        for turn in range(800):
            sending = asyncio.create_task(link.memo({"turn": turn, "ballast": "x" * 5000}))
            await asyncio.sleep(0)
        note("blocked", not sending.done())
        await sending
        os._exit(70)
        """,
    )
    assert json.loads(host.noted("blocked")) is True
    os.kill(init, signal.SIGCONT)
    assert host.exit_code() == 799 % 256, host.output()


def test_too_much_to_remember_is_refused_at_once(host):
    start(
        host,
        """
        refused = 0
        for attempt in (link.memo({"long": "x" * 70_000}), link.keep("slab", 1, {"long": "x" * 600})):
            try:
                await attempt
            except ValueError:
                refused += 1
        return refused
        """,
    )
    assert host.exit_code() == 2, host.output()


def test_an_agent_without_init_is_told_so():
    with pytest.raises(InitLinkError, match="KEEPSTEP_INIT_FD"):
        InitLink.from_environment({})
    with pytest.raises(InitLinkError, match="KEEPSTEP_INIT_STATE"):
        InitLink.from_environment({"KEEPSTEP_INIT_FD": "3", "KEEPSTEP_INIT_STATE": "{}"})
