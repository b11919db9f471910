"""What a strategy over two hosts sends when variables are made: everything at first, only the rest after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import LocalRun

TRACKED, FREE, OWN, LATE = 6, 3, 2, 1
"""Variables of jobs/apart.py: in the state, in none, each rank's by itself, and made after the state was there."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def of(run: LocalRun, generation: int) -> list[dict[str, Any]]:
    """What the ranks have told, by rank."""
    paths = (run.folder / "results" / "told").glob(f"{generation}-*.json")
    return [json.loads(path.read_text()) for path in sorted(paths)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("standby", [0, 1])
def test_only_what_no_state_holds_is_sent_after_a_restart(tmp_path: Path, standby: int) -> None:
    options = ["--store", str(tmp_path / "store")]
    options += [w for each in (f"launch.standby={standby}", "checkpoint.every=8 steps") for w in ("--set", each)]
    with LocalRun(tmp_path / "run", "apart.py", options=options) as run:
        run.wait_for(lambda: run.events("checkpoint_committed"), "a state to go on from")
        run.wait_for(lambda: len(run.events("standby_ready")) == standby * len(run.names), "standbys")
        (run.folder / "results" / "die").touch()
        run.wait_for(lambda: len(of(run, 2)) == 2, "a second generation")
        run.terminate()
        assert run.wait() == 143, run.told()
        assert run.left() == []
    first, again = of(run, 1), of(run, 2)
    assert [each["made"] for each in (*first, *again)] == [100.0, 110.0, 200.0, 210.0]
    for each in first:
        assert (each["sent"], each["step"]) == (TRACKED + FREE + OWN + LATE, 0)
        assert each["tracked"] == [100.0 + n for n in range(TRACKED)]
        assert each["free"] == [100.0, 101.0, 102.0, 100.0]
    for each in again:
        assert each["step"] > 0, run.told()
        assert each["tracked"] == [100.0 + each["step"] + n for n in range(TRACKED)]
        assert each["free"] == [200.0, 201.0, 202.0, 200.0], "the first worker's, as without keepstep"
        assert each["sent"] == FREE + OWN + LATE
    for world in (first, again):
        assert [each["moved"] for each in world] == [7.0, 8.0], "what a rank has assigned itself"
        assert [each["mine"] for each in world] == [70.0, 71.0], "and what it has got back by itself"
