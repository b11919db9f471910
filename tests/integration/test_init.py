"""The outermost process, as the agent, the platform and the kernel meet it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.init_host import Host, can_unshare, is_alive, state_of, wait_until

pytestmark = pytest.mark.integration

PSS_BYTES_MAX = 15 * 1024 * 1024
FIRST_IN_NAMESPACE = ("--mount-proc",)
NAMESPACE_WITH_FOREIGN_PROC = ("--kill-child",)  # no --mount-proc: /proc shows the outer namespace's numbers

needs_namespace = pytest.mark.skipif(not can_unshare(), reason="this machine does not let the tests make a namespace")
everywhere = pytest.mark.parametrize(
    "unshare",
    [
        pytest.param((), id="subreaper"),
        pytest.param(FIRST_IN_NAMESPACE, id="pid1", marks=needs_namespace),
        pytest.param(NAMESPACE_WITH_FOREIGN_PROC, id="pid1-foreign-proc", marks=needs_namespace),
    ],
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    left = host.left()
    host.clean_up()
    assert left == [], host.output()


@everywhere
@pytest.mark.parametrize("code", [0, 3, 78, 143])
def test_the_exit_code_of_the_agent_is_passed_on(host, unshare, code):
    host.start(f"end({code})", unshare=unshare)
    assert host.exit_code() == code


@everywhere
@pytest.mark.parametrize(("how", "code"), [(-signal.SIGKILL, 137), (-signal.SIGSEGV, 139), (70, 70)])
def test_an_agent_that_keeps_dying_is_given_up_when_the_budget_is_spent(host, unshare, how, code):
    host.start(f"note(f'boot-{{boot}}', 0); end({int(how)})", unshare=unshare, restarts_max=2)
    assert host.exit_code() == code
    assert sorted(path.name for path in host.folder.glob("boot-*")) == ["boot-0", "boot-1", "boot-2"]


@everywhere
def test_orphans_and_daemons_are_swept_at_the_end(host, unshare):
    host.start("start_worker(); start_orphan(); end(0)", unshare=unshare)
    assert host.exit_code() == 0
    host.noted("orphan")
    assert host.left() == []


@everywhere
def test_zombies_are_reaped_while_the_agent_runs(host, unshare):
    init = host.start(
        """
        for _ in range(50):
            if os.fork() == 0:
                if os.fork() == 0:
                    os._exit(0)
                os._exit(0)
            os.wait()
        note("forked", 50)
        wait_for("go")
        end(0)
        """,
        unshare=unshare,
    )
    host.noted("forked")
    children = Path(f"/proc/{init}/task/{init}/children")
    wait_until(lambda: len(children.read_text().split()) == 1, "nothing but the agent below init")
    (host.folder / "go").touch()
    assert host.exit_code() == 0


@everywhere
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_agent_and_nobody_else(host, unshare, number):
    init = host.start(
        f"""
        signal.signal({int(number)}, lambda *_: note("agent-got", 1))
        worker = start_worker(
            "signal.signal({int(number)}, lambda *_: os._exit(9));"
            "signal.pthread_sigmask(signal.SIG_UNBLOCK, [{int(number)}]);"
            "open(os.environ['HERE'] + '/worker-listens', 'w').close(); time.sleep(600)"
        )
        wait_for("worker-listens")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, init.FORWARDED)
        note("ready", 1)
        wait_for("agent-got")
        end(1 if worker.poll() is not None else 143)
        """,
        unshare=unshare,
    )
    host.noted("ready")
    os.kill(init, number)
    assert host.exit_code() == 143


def test_a_signal_that_comes_before_the_agent_listens_is_not_lost(host):
    init = host.start(
        """
        note("up", 1)
        wait_for("go")
        signal.signal(signal.SIGTERM, lambda *_: end(143))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, init.FORWARDED)
        end(1)
        """
    )
    host.noted("up")
    os.kill(init, signal.SIGTERM)
    wait_until(lambda: sigterm_pends(agent_of(init)), "the signal at the agent")
    (host.folder / "go").touch()
    assert host.exit_code() == 143


def test_a_restarted_agent_is_told_that_it_was_asked_to_stop(host):
    init = host.start(
        """
        if boot == 0:
            note("up", 1)
            while True:
                signal.sigwait([signal.SIGTERM])
                end(-signal.SIGKILL)
        end(143 if state["signals"] == [signal.SIGTERM] else 1)
        """
    )
    host.noted("up")
    os.kill(init, signal.SIGTERM)
    assert host.exit_code() == 143


def test_an_agent_that_a_forwarded_signal_ends_is_not_started_again(host):
    init = host.start(
        """
        note(f"boot-{boot}", 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, init.FORWARDED)
        time.sleep(600)
        """
    )
    host.noted("boot-0")
    os.kill(init, signal.SIGTERM)
    assert host.exit_code() == 143
    assert not (host.folder / "boot-1").exists()


@everywhere
def test_a_restarted_agent_finds_what_was_kept(host, unshare):
    host.start(
        """
        if boot == 0:
            link = connect()
            slab = os.memfd_create("slab")
            os.write(slab, b"state of step 120")
            link.send({"keep": "slab/0", "meta": {"layout": 3}}, slab)
            link.send({"keep": "slab/1"}, slab)
            link.send({"keep": "gone"}, slab)
            link.send({"drop": "gone"})
            link.send({"memo": {"lease": 7}})
            link.send({"memo": {"lease": 8}})
            end(-signal.SIGKILL)
        kept = state["kept"]
        note("found", [sorted(kept), kept["slab/0"]["meta"], os.pread(kept["slab/0"]["fd"], 99, 0).decode(),
                       os.pread(kept["slab/1"]["fd"], 5, 0).decode(), state["memo"], boot])
        end(-signal.SIGKILL if boot < 3 else 0)
        """,
        unshare=unshare,
    )
    assert host.exit_code() == 0
    assert json.loads(host.noted("found")) == [
        ["slab/0", "slab/1"],
        {"layout": 3},
        "state of step 120",
        "state",
        {"lease": 8},
        3,
    ]


def test_keeping_under_a_known_name_replaces_and_leaks_nothing(host):
    host.start(
        """
        link = connect()
        for turn in range(100):
            fd = os.memfd_create("slab")
            os.write(fd, str(turn).encode())
            link.send({"keep": "slab"}, fd)
            os.close(fd)
            while link.waiting:
                link.flush()
        link.send({"companion": "answer", "argv": ["true"]})
        hear(link)
        note("descriptors", len(os.listdir(f"/proc/{os.getppid()}/fd")))
        end(0)
        """
    )
    assert host.exit_code() == 0
    assert int(host.noted("descriptors")) < 16


@everywhere
def test_the_workers_of_a_dead_agent_are_gone_before_the_next_one_starts(host, unshare):
    host.start(
        """
        if boot == 0:
            link = connect()
            stubborn = subprocess.Popen(["sleep", "600"], start_new_session=True)
            link.send({"group": stubborn.pid})
            note("stubborn", stubborn.pid)
            end(-signal.SIGKILL)
        end(1 if kernel.has_members(json.loads((here / "stubborn").read_text())) else 0)
        """,
        unshare=unshare,
    )
    assert host.exit_code() == 0


def test_orphans_of_a_dead_agent_are_gone_before_the_next_one_starts(host):
    host.start(
        """
        if boot == 0:
            start_orphan()
            end(-signal.SIGKILL)
        end(0 if not kernel.is_alive(json.loads((here / "orphan").read_text())) else 1)
        """
    )
    assert host.exit_code() == 0


def test_the_workers_of_a_frozen_agent_are_killed_when_the_deadline_passes(host):
    init = host.start(
        """
        link = connect()
        worker = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $! > $HERE/escaped; sleep 600"],
                                  start_new_session=True)
        while not (here / "escaped").exists() or not (here / "escaped").read_text().strip():
            time.sleep(0.01)
        start_orphan()
        link.send({"group": worker.pid})
        deadline = time.monotonic() + 0.5
        link.send({"deadline": deadline})
        note("worker", worker.pid)
        os.kill(os.getpid(), signal.SIGSTOP)
        late = worker.wait() == -signal.SIGKILL and hear(link) == {"fenced": True}
        second = subprocess.Popen(["sleep", "600"], start_new_session=True)
        link.send({"group": second.pid})          # still fenced: it is killed at once
        second.wait()
        third = subprocess.Popen(["sleep", "600"], start_new_session=True)
        link.send({"deadline": time.monotonic() + 3600})
        link.send({"group": third.pid})
        link.send({"companion": "answer", "argv": ["true"]})
        hear(link)
        end(0 if late and third.poll() is None else 1)
        """
    )
    worker = int(host.noted("worker"))
    agent = agent_of(init)
    wait_until(lambda: state_of(agent) == "T", "the frozen agent")
    wait_until(lambda: not is_alive(worker), "the fence")
    for name in ("escaped", "orphan"):
        pid = int(host.noted(name))
        wait_until(lambda pid=pid: not is_alive(pid), name)
    os.kill(agent, signal.SIGCONT)
    assert host.exit_code() == 0, host.output()


def test_a_deadline_that_is_renewed_or_lifted_kills_nobody(host):
    host.start(
        """
        link = connect()
        worker = start_worker()
        link.send({"group": worker.pid})
        for later in (time.monotonic() + 3600, None):
            passes = time.monotonic() + 0.3
            os.kill(os.getppid(), signal.SIGSTOP)     # both are there by the time it looks, however slow this is
            link.send({"deadline": passes})
            link.send({"deadline": later})
            os.kill(os.getppid(), signal.SIGCONT)
            time.sleep(max(0.0, passes - time.monotonic()))
            link.send({"companion": "answer", "argv": ["true"]})
            while "companion" not in (told := hear(link)):
                if "fenced" in told:
                    end(1)
        end(0 if worker.poll() is None else 1)
        """
    )
    assert host.exit_code() == 0, host.output()


def test_a_killed_init_takes_all_down(host):
    init = host.start(
        """
        link = connect()
        worker = start_worker()
        link.send({"group": worker.pid})
        link.send({"companion": "etcd", "argv": ["sleep", "600"]})
        note("ready", hear(link)["pid"])
        time.sleep(600)
        """
    )
    host.noted("ready")
    os.kill(init, signal.SIGKILL)
    assert host.exit_code() == -signal.SIGKILL
    wait_until(lambda: host.left() == [], "everything to be gone")


def test_nonsense_from_the_agent_is_survived(host):
    host.start(
        """
        link = connect()
        end_of_line = link._connection
        end_of_line.send(b"not json")
        end_of_line.send(b"[1]")
        end_of_line.send(b'{"unknown": 1}')
        for pgid in (0, 1, -1, os.getpgrp(), os.getppid(), "x", None):
            link.send({"group": pgid})
        link.send({"keep": "without a descriptor"})
        link.send({"keep": "x", "meta": {"long": "x" * 1000}}, 1)
        link.send({"memo": 1})
        link.send({"memo": {"long": "x" * 100_000}})
        link.send({"companion": "c"})
        link.send({"stop_companion": "unknown"})
        link.send({"deadline": "soon"})
        link.send({"deadline": 1e999})
        link.send({"companion": "answer", "argv": ["true"]})
        answered = hear(link)
        while "companion_exited" in answered:  # the one that an earlier agent started may end only now
            answered = hear(link)
        if boot == 0:
            end(70)
        end(0 if answered["companion"] == "answer" and state["kept"] == {} and state["memo"] == {} else 1)
        """
    )
    assert host.exit_code() == 0, host.output()
    assert host.output().count("not obeyed") == 2 * 16


def test_init_stays_small(host):
    init = host.start(
        """
        link = connect()
        link.send({"companion": "etcd", "argv": ["sleep", "600"]})
        hear(link)
        note(f"boot-{boot}", 1)
        wait_for(f"go-{boot}")
        end(-signal.SIGKILL if boot < 3 else 0)
        """
    )
    for boot in range(4):
        host.noted(f"boot-{boot}")
        lines = Path(f"/proc/{init}/smaps_rollup").read_text().splitlines()
        pss_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        assert pss_bytes <= PSS_BYTES_MAX
        (host.folder / f"go-{boot}").touch()
    assert host.exit_code() == 0


def agent_of(init: int) -> int:
    """The pid of the agent below init, where it is the only child or the first."""
    return int(Path(f"/proc/{init}/task/{init}/children").read_text().split()[0])


def sigterm_pends(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return True
    return False
