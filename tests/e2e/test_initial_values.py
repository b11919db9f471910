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
    """What both ranks have told."""
    folder = run.folder / "results" / "told"
    return [json.loads((folder / f"{generation}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("standby", [0, 1])
def test_only_what_no_state_holds_is_sent_after_a_restart(tmp_path: Path, standby: int) -> None:
    options = ("--set", f"launch.standby={standby}")
    with LocalRun(tmp_path / "run", "apart.py", options=options) as run:
        assert run.wait() == 0, run.told()
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
