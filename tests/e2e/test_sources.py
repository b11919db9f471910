"""Samples of files, or of a function: whatever dies, each is seen once an epoch, as those in memory are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun, differences

OPTIONS = ("--set", "checkpoint.snapshot_every=4 steps", "--set", "checkpoint.every=8 steps")
STEPS = 60
SOURCES = ("files", "records", "function")

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400)]


def run_of(folder: Path, source: str, *options: str, words: Sequence[str] = ()) -> LocalRun:
    words = [f"--source={source}", f"--steps={STEPS}", *words]
    return LocalRun(folder / "run", "loop.py", words, (*OPTIONS, *options))


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What each rank ends with where the same samples are arrays and nothing happens."""
    with run_of(tmp_path_factory.mktemp("in-memory"), "arrays") as run:
        assert run.wait() == 0, run.told()
    return run.results()


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", SOURCES)
def test_a_death_costs_no_sample(source: str, in_memory: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with run_of(tmp_path, source, "--fault", "kill:1@30", words=[f"--gate=50:{gate}"]) as run:
        run.wait_for(lambda: len(run.events("worker_started", "algo-2")) > 1, "worker in the place of the killed one")
        gate.touch()
        assert run.wait() == 0, run.told()
        assert run.left() == []
    assert run.summary()["restarts"] == 1, run.told()
    assert differences(run.results(), in_memory) == []
