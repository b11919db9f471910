"""Ranks that mpirun starts on two hosts, without sshd: who fails is named, and all go on from the newest state.

Open MPI is the real one. Horovod and SageMaker's data parallel library are stood in for (tests/e2e/libraries), so that
any TensorFlow does; `make test-containers` has the real Horovod.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep import kernel
from tests.support.local_run import LocalRun, differences

LIBRARIES = Path(__file__).parent / "libraries"
STEPS, GATE_AT = 60, 40

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.more,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun: `make mpi`"),
]


def run_of(folder: Path, *knobs: str, arguments: Sequence[str] = (), strategy: str = "horovod") -> LocalRun:
    settings = [f"launch.strategy={strategy}", "restart.backoff.first=0s", "checkpoint.snapshot_every=1 step", *knobs]
    options = [word for setting in settings for word in ("--set", setting)]
    libraries = [LIBRARIES, *([LIBRARIES / "older"] if strategy == "smddp" else [])]
    return LocalRun(folder / "run", "ring.py", [f"--steps={STEPS}", *arguments], options, libraries=libraries)


def gate(folder: Path) -> tuple[str, Callable[[], None]]:
    """What holds training after a step, and what lets it go on."""
    path = folder / "gate"
    return f"--gate={GATE_AT}:{path}", path.touch


def ranks(run: LocalRun, generation: int) -> list[dict[str, Any]]:
    """What each rank of a generation has said of itself."""
    paths = (run.folder / "results" / "ranks").glob(f"{generation}-*.json")
    return [json.loads(path.read_text()) for path in sorted(paths)]


def at_the_gate(run: LocalRun) -> bool:
    """Whether both hosts are in the body of that step, or about to enter it."""
    done = [max((e["completed"] for e in run.events("steps_sampled", name)), default=0) for name in run.names]
    return min(done) >= GATE_AT - 1


def root_causes(run: LocalRun) -> set[str]:
    return {detail for name in run.names for reason, detail in run.notes(name) if reason == "restart_allowed"}


@pytest.fixture(scope="module")
def quiet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, LocalRun]:
    """A run that nothing befalls, and how many ranks each host has."""
    count = int(request.param)
    with run_of(tmp_path_factory.mktemp("quiet"), f"launch.ranks={count}") as run:
        assert run.wait() == 0, run.told()
        assert run.left() == []
    return count, run


each_count = pytest.mark.parametrize("quiet", [1, 2], ids=["one rank a host", "two ranks a host"], indirect=True)
"""So many ranks on each host."""


@each_count
def test_each_rank_sees_its_own_host_and_the_whole_world(quiet: tuple[int, LocalRun]) -> None:
    count, run = quiet
    found = ranks(run, 1)
    assert [(each["SM_CURRENT_HOST"], each["local"]) for each in found] == [
        (f"algo-{host}", local) for host in (1, 2) for local in range(count)
    ], run.told()
    assert {each["size"] for each in found} == {2 * count}
    assert {each["SM_HOSTS"] for each in found} == {'["algo-1","algo-2"]'}
    for each in found:  # two orted that share a folder crash each other
        scratch = run.folder / "hosts" / each["SM_CURRENT_HOST"] / "scratch"
        assert scratch in Path(each["PMIX_SERVER_TMPDIR"]).parents, each


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("quiet", "which"),
    [(1, 0), (2, -1), *([(1, -1), (2, 0)] if os.environ.get("KEEPSTEP_TEST_ALL") else [])],
    indirect=["quiet"],
)
def test_a_rank_that_is_killed_is_named_and_the_result_is_the_same(
    quiet: tuple[int, LocalRun], which: int, tmp_path: Path
) -> None:
    count, calm = quiet
    held, go_on = gate(tmp_path)
    with run_of(tmp_path, f"launch.ranks={count}", arguments=[held]) as run:
        run.wait_for(lambda: at_the_gate(run), "the gate")
        os.kill(ranks(run, 1)[which]["pid"], signal.SIGKILL)
        run.wait_for(lambda: len(ranks(run, 2)) == 2 * count, "a second generation")
        go_on()
        assert run.wait() == 0, run.told()
        assert run.left() == []
    host, rank = (1, 0) if which == 0 else (2, 2 * count - 1)
    (cause,) = root_causes(run)
    wanted = tuple(f"killed on algo-{host} rank {rank} at step {step}" for step in (GATE_AT - 1, GATE_AT))
    assert cause.startswith(wanted), cause
    assert run.summary()["generations"] == 2
    assert differences(run.results(), calm.results()) == []


def test_an_exception_in_a_rank_is_the_one_that_is_told(tmp_path: Path) -> None:
    with run_of(tmp_path, "launch.ranks=2", arguments=["--raise-at=20"]) as run:
        assert run.wait() == 0, run.told()
        assert run.left() == []
    (cause,) = root_causes(run)
    assert cause.startswith("user_code on algo-1 rank 1 at step "), cause
    assert cause.endswith(": ValueError: rank 1 does not like this step"), cause
    # mpirun puts its tag before each piece that it reads, which on a loaded machine is less than a line
    pieces = re.findall(r"\[1,1\]<stderr>:((?:(?!\[1,\d+\]<std).)*)", run.log("algo-1"))
    assert "ValueError: rank 1 does not like this step" in "".join(pieces), pieces


def test_a_rank_that_hangs_is_told_from_the_others_of_its_host(tmp_path: Path) -> None:
    knobs = ("launch.ranks=2", "hang.floor=3s", "hang.data=8s", "hang.pause=6s")
    with run_of(tmp_path, *knobs, arguments=["--hang-at=20"]) as run:
        assert run.wait() == 0, run.told()
        assert run.left() == []
    (cause,) = root_causes(run)
    assert cause.startswith("hang on algo-2 rank 3 at step 20: "), cause
    assert "ring.py:" in cause, cause
    for rank in range(4):
        name = f"algo-{1 + rank // 2}"
        folder = run.folder / "hosts" / name / "output" / "data" / "keepstep" / name / "stacks"
        assert re.match(r"Python stacks of process \d+", (folder / f"generation-1-rank-{rank}.txt").read_text())


def test_a_slow_rank_is_told_from_the_others_of_its_host(tmp_path: Path) -> None:
    knobs = ("launch.ranks=2", "straggler.window=5", "straggler.windows=2", "straggler.slower_than=3")
    with run_of(tmp_path, *knobs, arguments=["--slow=3", "--steps=5000"]) as run:
        run.wait_for(lambda: "straggler_found" in run.reasons(), "a straggler")
        (told, *_) = [text for host in run.names for reason, text in run.notes(host) if reason == "straggler_found"]
    assert told.startswith("algo-2 rank 3 works "), told
    assert ": rest takes " in told, told


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["mpirun", "orted"])
def test_what_starts_the_ranks_may_be_killed(program: str, tmp_path: Path) -> None:
    held, go_on = gate(tmp_path)
    with run_of(tmp_path, arguments=[held]) as run:
        run.wait_for(lambda: at_the_gate(run), "the gate")
        assert len(ranks(run, 1)) == 2, run.told()
        table, host = kernel.processes(), ranks(run, 1)[1 if program == "orted" else 0]
        above = host["pid"]
        while program not in Path(f"/proc/{above}/comm").read_text():
            above = table[above].parent
        os.kill(above, signal.SIGKILL)
        run.wait_for(lambda: len(ranks(run, 2)) == 2, "a second generation")
        go_on()
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert run.summary()["generations"] == 2


@pytest.mark.parametrize("quiet", [2, *([1] if os.environ.get("KEEPSTEP_TEST_ALL") else [])], indirect=True)
def test_an_interruption_is_one_agreed_step_which_the_next_run_goes_on_from(
    quiet: tuple[int, LocalRun], tmp_path: Path
) -> None:
    count, calm = quiet
    held, go_on = gate(tmp_path)
    store = f"--store={tmp_path / 'store'}"
    first = run_of(tmp_path, f"launch.ranks={count}", arguments=[held])
    first.options = [*first.options, store]
    with first as run:
        run.wait_for(lambda: at_the_gate(run), "the gate")
        run.terminate()
        run.wait_for(lambda: all("workers_held" in run.reasons(host) for host in run.names), "pause")
        go_on()
        assert run.wait() == 143, run.told()
        assert run.left() == []
        saved = run.summary()["durable_step"]
    assert GATE_AT <= saved <= GATE_AT + 1
    second = run_of(tmp_path / "second", f"launch.ranks={count}")
    second.options = [*second.options, store]
    with second as run:
        assert run.wait() == 0, run.told()
    assert any(detail.startswith("rank 0 of generation") and detail.endswith(f"at step {saved}")
               for reason, detail in run.notes("algo-1") if reason == "worker_starts"), run.told()  # fmt: skip
    assert differences(run.results(), calm.results()) == []


def test_the_data_parallel_library_is_started_by_what_it_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{LIBRARIES}{os.pathsep}{os.environ['PATH']}")
    with run_of(tmp_path, strategy="smddp", arguments=["--smddp"]) as run:
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert run.summary()["generations"] == 1, run.told()
    assert {each["STARTED_BY"] for each in ranks(run, 1)} == {"smddprun"}
