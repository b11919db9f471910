"""Hosts with a network of their own, and what happens to hosts and networks: the others go on, and no two worlds train.

Every host is a network namespace with a whole `keepstep train` in it; the training is TensorFlow's, with gradients
all-reduced over that network, or, where only the shape of a fault differs, a small stand-in that waits for its peers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.local_run import JOBS, PYTHON
from tests.support.many_hosts import ManyHosts, Turn, frozen
from tests.support.namespaces import missing
from tests.support.worlds import Worker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.skipif(bool(missing()), reason=missing())]

SNAPSHOTS = ("checkpoint.snapshot_every=4 steps", "checkpoint.every=8 steps")
QUICK = ("coordination.lease=3s",)
SHRINK = ("elastic.hosts.min=2", "elastic.wait_for_return=3s", *QUICK)
"""Three hosts are wanted, two are enough, and a lost one is not waited for."""
PATIENT = ("elastic.wait_for_return=4min", *QUICK)

GATE = "gate"
LOCKSTEP = Path(__file__).parents[1] / "support" / "lockstep_job.py"


def tensorflow(folder: Path, steps: int, *settings: str, hosts: int = 3) -> ManyHosts:
    """A custom loop that draws all samples through `run.dataset`, whatever the world's size.

    It takes its time, and comes to its end, once `may_end` was called: what is left of the world would be done before
    another takes part. That one is let in at a checkpoint, so the gate is far behind where that may happen.
    """
    folder.mkdir(exist_ok=True)
    gate = f"--gate={steps - 10}:{folder / GATE}"
    arguments = ["--out", str(folder), f"--steps={steps}", "--pause=0.2", gate]
    run = ManyHosts(
        folder / "run",
        JOBS / "loop.py",
        arguments,
        hosts=hosts,
        python=PYTHON,
        settings=(*SNAPSHOTS, *settings),
    )
    run.environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
    return run


def may_end(folder: Path) -> None:
    """Let a training of `tensorflow` come to its end."""
    (folder / GATE).touch()


def lockstep(folder: Path, steps: int, *settings: str, hosts: int = 3, etcd_elsewhere: bool = False) -> ManyHosts:
    """A stand-in without TensorFlow, for what does not depend on it."""
    folder.mkdir(exist_ok=True)
    snapshots = ("checkpoint.snapshot_every=10 steps", "checkpoint.every=50 steps")
    return ManyHosts(
        folder / "run",
        LOCKSTEP,
        [str(folder), str(steps), "0.02"],
        hosts=hosts,
        settings=(*snapshots, *settings),
        etcd_elsewhere=etcd_elsewhere,
    )


def trains(run: ManyHosts) -> tuple[str, int]:
    """Wait until something is committed; returns the leader, and the generation that trains."""
    run.wait_for(lambda: run.durable(), "commit")
    leader = run.leader()
    assert leader is not None
    return leader, run.generation()


def first_steps(run: ManyHosts, generation: int) -> list[Turn]:
    """The first steps that workers of a generation completed."""
    pids = {(worker.host, worker.pid) for worker in run.worlds.of(generation)}
    ids = {turn.event["worker_id"] for turn in run.events("worker_started") if (turn.host, turn.event["pid"]) in pids}
    return [turn for turn in run.events("first_step_completed") if turn.event["worker_id"] in ids]


def new_world(run: ManyHosts, hosts: set[str], *, after: int) -> int:
    """Wait until a generation after that one, of exactly these hosts, has completed a step; returns its number."""

    def found() -> int:
        numbers = [record["number"] for record in run.generations() if record["number"] > after]
        return next((n for n in numbers if set(run.world(n)) == hosts and first_steps(run, n)), 0)

    return run.wait_for(found, f"step of a world of {sorted(hosts)}")


def lost_to_others(run: ManyHosts, host: str) -> bool:
    """Whether the others have come together without this host.

    What they say was the reason for it may be another one: cut off from their etcd's leader they may lose a lease, and
    with it a worker, before they miss a host.
    """
    return any(host not in [name for name, *_ in record["members"]] for record in run.generations("forming"))


def gone_before(run: ManyHosts, host: str, older: int, newer: int) -> bool:
    """Whether a host's workers of one generation were gone before the first worker of another was made."""
    olds, news = run.worlds.of(older, host), run.worlds.of(newer)
    assert olds and news, run.worlds.workers
    return all(ended_at(old) < min(new.started_at for new in news) for old in olds)


def ended_at(worker: Worker) -> float:
    return float("inf") if worker.gone_at is None else worker.gone_at


def is_sound(run: ManyHosts) -> None:
    """What holds whatever happened: one world at a time, no committed step lost, no commit by an old generation."""
    assert run.worlds.overlaps() == [], run.told()
    commits = run.committed()
    assert [turn.event["generation"] for turn in commits] == sorted(turn.event["generation"] for turn in commits)
    for record in run.generations():
        before = [turn.event["step"] for turn in commits if turn.event["generation"] < record["number"]]
        resumed = record["resume"]["step"] if record["resume"] else 0
        assert resumed >= max(before, default=0), record


def is_done(run: ManyHosts, steps: int) -> None:
    """That the newest world has reached the last step, and committed it."""
    is_sound(run)
    head = run.head()
    assert (head["step"], head["generation"]) == (steps, run.generation()), run.told()


# --- three hosts -----------------------------------------------------------------------------------------------------


def test_a_leader_that_is_cut_off_for_good_is_done_without(tmp_path: Path) -> None:
    with tensorflow(tmp_path, 90, *SHRINK) as run:
        leader, first = trains(run)
        run.network.cut(leader)
        run.may_end.add(leader)
        rest = set(run.names) - {leader}
        number = new_world(run, rest, after=first)
        assert gone_before(run, leader, first, number)
        may_end(tmp_path)
        assert set(run.wait(*rest).values()) == {0}, run.told()
        assert run.wait(leader) == {leader: 75}, run.told()
        is_done(run, 90)
        assert run.worlds.of(number, leader) == []
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["0.npz", "1.npz"]


def test_a_frozen_leader_has_no_worker_left_and_awakes_to_a_world_of_others(tmp_path: Path) -> None:
    with tensorflow(tmp_path, 200, *SHRINK) as run:
        leader, first = trains(run)
        rest = set(run.names) - {leader}
        with frozen(run, run.agent(leader)):
            number = new_world(run, rest, after=first)
            assert gone_before(run, leader, first, number)
            turns = len(run.turns(leader))
        new_world(run, set(run.names), after=number)
        may_end(tmp_path)
        awake = run.turns(leader)[turns:]
        assert not [turn for turn in awake if stale(turn, number)]
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, 200)
        assert "the lease deadline has passed" in run.log(leader)


def stale(turn: Turn, number: int) -> bool:
    """Whether something came about that belongs to a generation before that one."""
    own_put = turn.kind == "record_put" and turn.record["kind"] == "generation" and turn.record["number"] < number
    return own_put or (turn.kind == "checkpoint_committed" and turn.event["generation"] < number)


def test_a_host_that_dies_is_done_without_and_takes_part_again_when_it_is_back(tmp_path: Path) -> None:
    with tensorflow(tmp_path, 200, *SHRINK) as run:
        leader, first = trains(run)
        lost = next(host for host in reversed(run.names) if host != leader)
        run.kill_host(lost)
        number = new_world(run, set(run.names) - {lost}, after=first)
        run.restart_host(lost)
        new_world(run, set(run.names), after=number)
        may_end(tmp_path)
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, 200)
        gave = [line for line in run.log(lost).splitlines() if "state of step" in line]
        assert any(" gave " in line for line in gave), f"the others held the agreed step in memory: {gave}"


def cut_ways(run: ManyHosts, ways: list[tuple[str, str]]) -> None:
    for source, target in ways:
        run.network.cut_one_way(source, target)


PARTITIONS: dict[str, Callable[[ManyHosts, str, str], None]] = {
    "leader off": lambda run, leader, other: run.network.cut(leader),
    "other host off": lambda run, leader, other: run.network.cut(other),
    "leader not heard": lambda run, leader, other: cut_ways(run, [(leader, h) for h in run.names if h != leader]),
    "leader hears nobody": lambda run, leader, other: cut_ways(run, [(h, leader) for h in run.names if h != leader]),
}


@pytest.mark.parametrize(
    ("shape", "job"),
    [*(pytest.param(shape, lockstep, marks=pytest.mark.hosts) for shape in PARTITIONS), ("leader off", tensorflow)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_partition_that_heals_costs_a_generation(shape: str, job: Callable[..., ManyHosts], tmp_path: Path) -> None:
    steps = 90 if job is tensorflow else 450
    with job(tmp_path, steps, *PATIENT) as run:
        leader, first = trains(run)
        other = next(host for host in run.names if host != leader)
        PARTITIONS[shape](run, leader, other)
        off = other if shape == "other host off" else leader
        run.wait_for(lambda: lost_to_others(run, off), f"loss of {off}")
        run.network.heal()
        number = new_world(run, set(run.names), after=first)
        may_end(tmp_path)
        assert gone_before(run, off, first, number)
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, steps)
    if job is lockstep:
        assert json.loads((tmp_path / "result.json").read_text()) == {
            "total": steps * (steps + 1) // 2,
            "world_size": 3,
        }


@pytest.mark.hosts
def test_lost_and_late_packets_do_no_harm(tmp_path: Path) -> None:
    with lockstep(tmp_path, 400, *PATIENT) as run:
        trains(run)
        run.network.loss("algo-2", 0.03)
        run.network.delay("algo-3", 0.02)
        step, durable = run.completed(), run.durable()
        run.wait_for(lambda: run.completed() > step + 30 and run.durable() > durable, "steps and a commit meanwhile")
        run.network.heal()
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, 400)
    assert json.loads((tmp_path / "result.json").read_text())["total"] == 400 * 401 // 2


# --- the hosts' own etcd ---------------------------------------------------------------------------------------------


def test_a_host_that_keeps_etcd_is_replaced_by_one_that_does_not(tmp_path: Path) -> None:
    with tensorflow(tmp_path, 200, *SHRINK, hosts=4) as run:
        _, first = trains(run)
        run.kill_host("algo-1")
        number = new_world(run, {"algo-2", "algo-3", "algo-4"}, after=first)
        run.wait_for(lambda: set(run.etcd_hosts()) == {"algo-2", "algo-3", "algo-4"}, "new member")
        assert run.etcd("algo-4") is not None
        run.kill_host("algo-3")  # one of the first three members is left: with the new one they are two of three
        new_world(run, {"algo-2", "algo-4"}, after=number)
        may_end(tmp_path)
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, 200)


@pytest.mark.hosts
def test_an_etcd_that_dies_is_started_again_on_its_data(tmp_path: Path) -> None:
    with lockstep(tmp_path, 1200, *PATIENT) as run:
        trains(run)
        for host in run.names:  # one after the other: a majority is there all the time
            old = run.etcd(host)
            run.kill(old)
            run.wait_for(lambda host=host, old=old: run.etcd(host) not in (None, old), f"etcd on {host}")  # type: ignore[misc]
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, 1200)


def test_who_loses_the_only_etcd_commits_what_is_sealed_and_gives_up(tmp_path: Path) -> None:
    with tensorflow(tmp_path, 5000, "elastic.wait_for_return=3s", *QUICK, hosts=2) as run:
        _, first = trains(run)
        run.kill_host("algo-1")
        assert run.wait("algo-2") == {"algo-2": 75}, run.told()
        is_sound(run)
        sealed = max(turn.event["step"] for turn in run.events("snapshot_verified", "algo-2"))
        head = run.head()
        assert (head["step"], head["generation"]) == (sealed, first), run.told()


@pytest.mark.hosts
def test_an_etcd_that_is_there_already_is_used(tmp_path: Path) -> None:
    with lockstep(tmp_path, 300, *SHRINK, hosts=2, etcd_elsewhere=True) as run:
        _, first = trains(run)
        assert [run.etcd(host) for host in run.names] == [None, None]
        run.kill(run.worker("algo-2"))
        new_world(run, set(run.names), after=first)
        assert set(run.wait().values()) == {0}, run.told()
        is_done(run, 300)
