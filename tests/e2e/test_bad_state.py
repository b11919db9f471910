"""A state that is whole and no good all the same: it is given up for an older one, or not saved at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun, differences

SNAPSHOTS = ("--set", "checkpoint.snapshot_every=4 steps", "--set", "checkpoint.every=16 steps")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_state_with_nan_counts_against_its_snapshot(tmp_path: Path) -> None:
    with LocalRun(tmp_path / "quiet", "loop.py", ["--steps=60"], SNAPSHOTS) as quiet:
        assert quiet.wait() == 0, quiet.told()
    spoilt = ["--steps=60", "--spoil=27"]
    with LocalRun(tmp_path / "hurt", "loop.py", spoilt, (*SNAPSHOTS, "--fault", "kill:1@30")) as hurt:
        assert hurt.wait() == 0, hurt.told()
    told = [detail for host in hurt.names for reason, detail in hurt.notes(host) if reason == "state_distrusted"]
    found = [re.fullmatch(r"step (\d+), of which 2 worlds died at once", detail) for detail in told]
    distrusted = {int(each[1]) for each in found if each}
    assert len(found) == len(distrusted) and distrusted <= {28, 32}, "those that were taken before the kill"
    assert 28 in distrusted
    assert hurt.summary()["restarts"] == 1 + 2 * len(distrusted), hurt.told()
    logs = [hurt.log(host) for host in hurt.names]
    assert any("step 29, the first from the state of step 28, has left NaN in model/" in log for log in logs)
    assert differences(hurt.results(), quiet.results()) == []


def test_a_variable_that_would_not_be_saved_ends_the_script(tmp_path: Path) -> None:
    options = (*SNAPSHOTS, "--set", "restart.ceiling=0")
    with LocalRun(tmp_path, "loop.py", ["--steps=60", "--late"], options, hosts=1) as run:
        assert run.wait() != 0, run.told()
    assert "made after track(), so that it would not be saved: model/" in run.told()
    assert run.completed() <= 4, "it is told when the state is first saved"
