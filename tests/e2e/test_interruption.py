"""SIGTERM to all hosts at any moment: what was trained is committed, and the next run goes on from that very step.

KEEPSTEP_TEST_ALL=1 has all moments; else they are some that follow on each other, by KEEPSTEP_TEST_SEED.
"""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.init_host import can_unshare
from tests.support.local_run import ACCOUNT_S, LocalRun, differences

NAMESPACE = "unshare --pid --fork --mount-proc"
BEFORE_FIRST_STEP_S = 20.0
"""Much less than the grace: nobody waited for what can not come."""
EVERYTHING = bool(os.environ.get("KEEPSTEP_TEST_ALL"))
SEED = zlib.crc32(os.environ.get("KEEPSTEP_TEST_SEED", "").encode())
SAMPLE = 3

# each script: arguments of a run that goes on until it is told to stop, of one that reaches the last step, that step
SCRIPTS = {
    "loop.py": (("--steps=240", "--pause=0.05"), ("--steps=240", "--pause=0"), 240),
    "fit.py": (("--epochs=6", "--pause=0.05"), ("--epochs=6", "--pause=0"), 240),
}
OPTIONS = ("--set", "checkpoint.every=6 steps", "--set", "checkpoint.snapshot_every=3 steps")
MOMENTS = {
    "loop.py": [
        *("start", "import", "joined", "step", "sealed", "upload"),
        *("commit", "step", "restart", "import", "sealed", "step"),
    ],
    "fit.py": ["start", "import", "joined", "step", "upload", "validation", "sealed", "validation"],
}
IN_A_NAMESPACE = {
    "loop.py": [
        *("start", "import", "step", "sealed", "upload", "step"),
        *("joined", "commit", "import", "sealed", "upload", "step"),
    ],
    "fit.py": ["joined", "validation", "step", "start", "sealed", "upload", "import", "validation"],
}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Head:
    """What the store's HEAD says, and all manifests that are there."""

    step: int
    generation: int
    manifest: str
    manifests: frozenset[str]


def read_head(store: Path) -> Head:
    manifests = frozenset(path.name for path in store.glob("local/manifests/*.json"))
    path = store / "local" / "HEAD.json"
    if not path.exists():
        return Head(0, 0, "", manifests)
    head = json.loads(path.read_text())
    return Head(int(head["step"]), int(head["generation"]), Path(head["manifest"] or "").name, manifests)


def stepped(run: LocalRun) -> bool:
    """Whether every host's worker has completed a step."""
    return all(run.events("first_step_completed", host) for host in run.names)


def trained(run: LocalRun, before: int) -> bool:
    """Whether a worker of every host has completed a step after `before`."""
    return all(any(exit["completed"] > before for exit in run.events("worker_exited", host)) for host in run.names)


def wait_for_moment(run: LocalRun, moment: str, draw: random.Random) -> None:
    """Return when the run has reached a moment, or a little later."""
    looks: dict[str, Callable[[], Any]] = {
        # init stands in each host, so that no signal is lost to a namespace whose first process has no handlers yet
        "start": lambda: all(run.log(host) for host in run.names),
        "import": lambda: all(run.events("worker_started", host) for host in run.names),
        "joined": lambda: run.events("worker_joined"),
        "step": lambda: stepped(run),
        "sealed": lambda: stepped(run) and run.events("snapshot_sealed"),
        "upload": lambda: stepped(run) and "upload_starts" in run.reasons(),
        "commit": lambda: stepped(run) and "commit_starts" in run.reasons(),
        "restart": lambda: stepped(run) and "worker_failed" in run.reasons(),
        "validation": lambda: stepped(run) and "validation begins" in run.log("algo-1"),
    }
    run.wait_for(looks[moment], moment)
    delay_s = {"start": 1.5, "import": 2.0, "step": 1.5}.get(moment, 0.1) * draw.random()
    time.sleep(delay_s)  # the moment itself is what is drawn


class Chain:
    """Runs of one script, one after the other, with one store."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        self.folder, self.script, self.options = folder, script, (*OPTIONS, *options)
        self.store = folder / "store"
        self.runs = 0
        self.born_at: dict[str, float] = {}

    def run(self, arguments: tuple[str, ...], *options: str) -> LocalRun:
        self.runs += 1
        words = (*self.options, "--store", str(self.store), *options)
        return LocalRun(self.folder / f"run-{self.runs}", self.script, arguments, words)

    def interrupt(self, moment: str, draw: random.Random) -> None:
        """Run until the moment has come, interrupt all hosts, and check what must hold then."""
        before = read_head(self.store)
        restart = ("--fault", f"kill:1@{before.step + 3}") if moment == "restart" else ()
        with self.run(SCRIPTS[self.script][0], *restart) as run:
            wait_for_moment(run, moment, draw)
            had_stepped = stepped(run)
            signalled_at = time.monotonic()
            run.terminate()
            assert run.wait() == 143, run.told()
            exit_s = time.monotonic() - signalled_at
            assert run.left() == [], run.told()
        assert run.summary()["exit_codes"] == dict.fromkeys(run.names, 143), run.told()
        self.account(run)
        for event in run.events("first_step_completed")[: len(run.names) if moment != "restart" else 0]:
            assert event["step"] == before.step + 1, run.told()
        after = read_head(self.store)
        if had_stepped:
            assert after.step > before.step, run.told()
        if (after.step, after.manifest) == (before.step, before.manifest):
            # HEAD may have been claimed: a host that leaves as it begins makes the others form another generation
            assert (after.generation >= before.generation, after.manifests) == (True, before.manifests), run.told()
        else:
            exits = {host: [e["completed"] for e in run.events("worker_exited", host)] for host in run.names}
            assert all(exits.values()), f"{moment}: {before} {after} {exits}\n{run.told()}"
            assert before.step < after.step <= min(map(max, exits.values())), run.told()
            assert after.manifest in after.manifests - before.manifests, run.told()
            assert after.generation > before.generation, run.told()  # though etcd was empty
        if not trained(run, before.step):
            assert (after.step, after.manifest) == (before.step, before.manifest), run.told()
            assert exit_s < BEFORE_FIRST_STEP_S, run.told()

    def finish(self) -> LocalRun:
        """Run to the last step."""
        with self.run(SCRIPTS[self.script][1]) as run:
            assert run.wait() == 0, run.told()
            assert run.left() == []
        self.account(run)
        return run

    def account(self, run: LocalRun) -> None:
        """Every second since the first run's beginning is in one bucket, those between the runs as well."""
        accounts = run.accounts()
        assert sorted(accounts) == run.names, run.told()
        for host, account in accounts.items():
            lived_s = account["ended_at"] - self.born_at.setdefault(host, account["born_at"])
            assert abs(sum(account["seconds"].values()) - lived_s) <= self.runs * ACCOUNT_S, f"{lived_s:.3f}: {account}"


Results = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module", params=list(SCRIPTS))
def script(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(script: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank ends with where nothing happens."""
    with LocalRun(tmp_path_factory.mktemp("undisturbed"), script, SCRIPTS[script][1], OPTIONS) as run:
        assert run.wait() == 0, run.told()
    return run.results()


def interrupted_again_and_again(
    folder: Path, script: str, moments: list[str], undisturbed: Results, *options: str
) -> None:
    first = SEED % len(moments)
    moments = moments if EVERYTHING else (moments + moments)[first : first + SAMPLE]
    chain = Chain(folder, script, *options)
    draw = random.Random(script)
    for moment in moments:
        chain.interrupt(moment, draw)
    before = read_head(chain.store)
    last_step = SCRIPTS[script][2]
    assert moments.count("step") <= before.step < last_step
    last = chain.finish()
    assert {event["step"] for event in last.events("first_step_completed")} == {before.step + 1}
    ended = read_head(chain.store)
    assert ended.step == last_step
    assert ended.generation > before.generation
    assert [name for name in differences(last.results(), undisturbed) if ":history/" not in name] == []


def test_interrupted_at_any_moment_it_goes_on_from_the_step_it_saved(
    script: str, undisturbed: Results, tmp_path: Path
) -> None:
    interrupted_again_and_again(tmp_path, script, MOMENTS[script], undisturbed)


@pytest.mark.sample(1)
@pytest.mark.skipif(not can_unshare(), reason="needs the right to make PID namespaces")
def test_the_same_where_keepstep_is_pid_1(script: str, undisturbed: Results, tmp_path: Path) -> None:
    interrupted_again_and_again(tmp_path, script, IN_A_NAMESPACE[script], undisturbed, "--wrap", NAMESPACE)
