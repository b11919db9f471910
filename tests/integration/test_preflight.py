"""Whole jobs on hosts of their own, one of which is bad before it trains: it is named, and held up nobody for long.

Machines are stood in for by network namespaces, a cgroup with a quota, and a file system that can not be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.core.preflight import LIMIT_S
from tests.support import control_groups
from tests.support.control_groups import control_group
from tests.support.many_hosts import ManyHosts, Turn, frozen
from tests.support.namespaces import missing

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.skipif(bool(missing()), reason=missing())]

LOCKSTEP = Path(__file__).parents[1] / "support" / "lockstep_job.py"
A_FIFTH = "20000 100000"
"""Microseconds of a processor, and of what."""
BAD = "algo-2"
LEASE_S = 60.0
"""Who judges before that has waited neither for the lease of a silent host nor for the end of a dead line, by TCP."""


class Spoilt(ManyHosts):
    """A job with a bad host.

    Attributes:
        before: done to that host before it starts; `after`: as soon as its first process is there.
        held: hosts that are not started with the others.
    """

    before: Callable[[Spoilt], None] = staticmethod(lambda run: None)
    after: Callable[[Spoilt], None] = staticmethod(lambda run: None)
    held: set[str]

    def boot(self, host: str) -> None:
        if host in self.held:
            self.may_end.add(host)
            return
        if host == BAD:
            self.before(self)
        super().boot(host)
        if host == BAD:
            self.after(self)

    def start_held(self) -> None:
        """Start those that were held back."""
        late = sorted(self.held)
        self.held.clear()
        self.may_end -= set(late)
        for host in late:
            self.boot(host)

    @property
    def model(self) -> Path:
        """Where the bad host's model goes."""
        return self.folder / "hosts" / BAD / "1" / "ml" / "model"


def spoilt(folder: Path, *settings: str, hosts: int = 3, steps: int = 50) -> Spoilt:
    folder.mkdir(exist_ok=True)
    arguments = [str(folder), str(steps), "0.02"]
    run = Spoilt(folder / "run", LOCKSTEP, arguments, hosts=hosts, settings=("elastic.hosts.min=1", *settings))
    run.held = set()
    return run


def named(run: Spoilt, check: str, bad: str = BAD) -> list[str]:
    """What the leader has found wrong with the bad host, in this respect; fails where it has named another one.

    That something lies between two hosts, "algo-1 or algo-3", is held against neither: on a machine that all share a
    line may be slow for seconds for nobody's fault.
    """
    lines = [line for host in run.names for line in run.log(host).splitlines() if "| preflight finds: " in line]
    texts = [line.partition("| preflight finds: ")[2] for line in lines if f": {check}: " in line]
    alone = [text for text in texts if " or " not in text.partition(":")[0]]
    assert {text.partition(":")[0] for text in alone} <= {bad}, texts
    return alone


def excluded(run: Spoilt, bad: str = BAD) -> bool:
    """Whether the first world began without the bad host."""
    return bad not in run.world(run.generations()[0]["number"])


def serving_follower(run: Spoilt, hosts: list[str]) -> str | None:
    """A follower of the only leader there can be of these hosts, with an uploader that stays; None before that.

    Another one serves before a host has joined, for the certificates. And the silence of who leads is found otherwise,
    by its lease or by asking again.
    """
    leader = run.leader()
    joined = {turn.record["host"] for turn in run.records("node")}  # each has seen itself, at the least
    if leader is None or joined != set(hosts):
        return None
    found = next(host for host in hosts if host != leader)
    return found if run.uploader(found) else None


def ended(run: Spoilt) -> dict[str, int]:
    codes = run.wait()
    run.look()
    return codes


@pytest.mark.parametrize("hosts", [3, 4])
def test_a_host_behind_a_throttled_line(tmp_path, hosts):
    run = spoilt(tmp_path, "health.preflight=exclude", hosts=hosts)
    run.before = lambda run: run.network.rate(BAD, 8_000)
    with run:
        assert set(ended(run).values()) == {0}
        assert named(run, "link") and excluded(run)


@pytest.mark.skipif(bool(control_groups.missing("cpu")), reason=control_groups.missing("cpu"))
def test_a_host_with_a_fifth_of_a_processor(tmp_path):
    run = spoilt(tmp_path, "health.preflight=exclude")
    with control_group("cpu", cpu_max=A_FIFTH) as group:
        run.after = lambda run: (group / "cgroup.procs").write_text(str(run.life(BAD).process.pid)) and None
        with run:
            assert set(ended(run).values()) == {0}
        told = "".join(run.log(host) for host in run.names)
        assert f"| preflight finds: {BAD}: speed: " in told
        # A machine that starves may have another host found wanting, too, and of three only one can be left out.
        (left_out,) = set(run.names) - set(run.world(run.generations()[0]["number"]))
        assert f"| preflight finds: {left_out}: " in told
        if all(f"| preflight finds: {other}: " not in told for other in run.names if other != BAD):
            assert left_out == BAD


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(run: Spoilt) -> contextlib.AbstractContextManager[None]:
    return mounted(run.model, "-t", "tmpfs", "-o", "ro,size=1m", "none")


@contextlib.contextmanager
def full(run: Spoilt) -> Iterator[None]:
    with mounted(run.model, "-t", "tmpfs", "-o", "size=1m", "none"):
        (run.model / "weights").write_bytes(bytes(1 << 20))
        yield


@pytest.mark.parametrize(("spoil", "says"), [(read_only, "Read-only file system"), (full, "No space left on device")])
def test_a_host_whose_disk_can_not_be_written_ends_the_job(tmp_path, spoil, says):
    run = spoilt(tmp_path, "health.preflight=fail")
    with spoil(run), run:
        assert set(ended(run).values()) == {76}
        (found,) = named(run, "disk")
        assert says in found
        for host in run.names:
            text = run.failure(host) or ""
            assert f"{BAD}: disk: model: {run.model}" in text and says in text and "hint" not in text


def planned(run: Spoilt) -> Turn:
    """The turn in which the first preflight was known to its leader."""
    leader = run.leader()
    return run.wait_for(lambda: next((t for t in run.records("preflight", leader)), None), "preflight")


def bound(run: Spoilt) -> tuple[float, list[Turn]]:
    """How long the leader's verdict took by its own clock, and the turns in which it found something."""
    found = [turn for turn in run.turns(run.leader()) if "preflight_finds" in turn.reasons]
    return found[0].now - planned(run).now, found


def is_locked(store: Path) -> bool:
    """Whether somebody holds the lock of a store in a directory."""
    for path in store.rglob(".lock"):
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def test_an_uploader_that_does_not_answer_is_not_waited_for(tmp_path):
    """Others find its line dead; its own look ends with what it could find out."""
    run = spoilt(tmp_path, "health.preflight=exclude")
    *early, last = run.names
    run.held.add(last)  # without it nothing is planned, so that no line has been tried yet
    with run:
        bad = run.wait_for(lambda: serving_follower(run, early), "followers")
        with contextlib.ExitStack() as frost:
            frost.enter_context(frozen(run, run.uploader(bad)))
            while is_locked(run.store):  # by the frozen one: nobody else would get on
                frost.close()
                frost.enter_context(frozen(run, run.uploader(bad)))
            run.start_held()
            run.wait_for(lambda: run.generations(), "world")
            took_s, found = bound(run)
            assert found and took_s < LEASE_S, run.told()
            assert named(run, "link", bad) and excluded(run, bad)
        assert set(ended(run).values()) == {0}


def test_an_agent_that_says_nothing_is_named_when_the_bound_is_over(tmp_path):
    """Its lease outlasts the bound, so it is there all the while."""
    run = spoilt(tmp_path, "health.preflight=exclude", f"coordination.lease={LEASE_S:g}s")
    *early, last = run.names
    run.held.add(last)  # without it nothing is planned, so that nobody has answered yet
    with run:
        bad = run.wait_for(lambda: serving_follower(run, early), "followers")
        run.may_end.add(bad)
        with frozen(run, run.agent(bad)):
            run.start_held()
            run.wait_for(lambda: run.generations(), "world")
            took_s, _ = bound(run)
            assert LIMIT_S <= took_s < LEASE_S
            assert named(run, "answer", bad) and excluded(run, bad)
        assert set(ended(run).values()) == {0}


def test_a_line_that_drops_everything_is_named_by_its_ends(tmp_path):
    run = spoilt(tmp_path, "health.preflight=warn", steps=100_000)
    run.after = lambda run: run.network.cut_pair("algo-2", "algo-3")
    with run:
        turn = run.wait_for(
            lambda: next((t for t in run.turns() if "preflight_finds" in t.reasons), None), "finding"
        )  # fmt: skip
        assert turn.now - planned(run).now < LEASE_S
        run.network.heal()
        told = "".join(run.log(host) for host in run.names)
        assert "is not reached from" in told
