"""A rank that all others wait for is profiled beside a healthy one, while both train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_spares import slowed, worlds
from tests.support.local_run import LocalRun

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400)]

KNOBS = (
    *("straggler.respond=profile", "straggler.slower_than=3", "straggler.window=5", "straggler.windows=2"),
    "checkpoint.every=1000 steps",
)
FIRST = 8
"""Fewer steps than it takes to find a straggler: at the first ones anyone may be slow."""
SCRIPTS = {
    "loop.py": ("--steps=1000000", "--pause=0", "--loose"),
    "fit.py": ("--epochs=100000", "--pause=0", "--loose"),
}


def folders(place: Path) -> dict[str, Path]:
    """By host, the one profile that there is."""
    found = {path.parent.parent.name: path.parent for path in place.glob("**/report.json")}
    assert len(found) == len(list(place.glob("**/report.json")))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_straggler_and_a_healthy_peer_are_profiled(tmp_path, script):
    settings = [word for knob in KNOBS for word in ("--set", knob)]
    options = ["--store", str(tmp_path / "store"), *settings]
    gate = tmp_path / "gate"
    words = [*SCRIPTS[script], f"--gate={FIRST}:{gate}"]
    with LocalRun(tmp_path / "run", script, words, options, hosts=2) as run:
        run.wait_for(lambda: run.completed() >= FIRST - 1, "steps")
        with slowed(run, "algo-2"):
            gate.touch()
            run.wait_for(lambda: len(run.events("worker_profiled")) == 2, "profiles")
            reached = run.completed()
            run.wait_for(lambda: run.completed() >= reached + 20, "steps behind the profiles")
        run.terminate()
        assert run.wait() == 143, run.told()
    assert len(worlds(run)) == 1 and not {"worker_failed", "world_hangs"} & set(run.reasons()), run.told()
    assert run.summary()["lost_steps"] == 0
    kept = {host: next(iter(run.events("worker_profiled", host))) for host in run.names}
    assert [event["trouble"] for event in kept.values()] == [[], []], run.told()
    for host, event in kept.items():
        folder = Path(event["folder"])
        assert folder.parent == run.folder / "hosts" / host / "output" / "data" / "keepstep" / host / "profiles"
        assert not list(folder.parent.glob("*.part"))
        sample = json.loads((folder / "py-spy.speedscope.json").read_text())
        assert any("train" in frame["name"] or "main" in frame["name"] for frame in sample["shared"]["frames"])
        (traced,) = folder.glob("plugins/profile/*/*.xplane.pb")
        assert b"CollectiveReduce" in traced.read_bytes()
        report = json.loads((folder / "report.json").read_text())
        assert report["verdict"].startswith("algo-2 rank ") and report["peer"] == "algo-1"
        assert report["this"]["is"] == ("slow" if host == "algo-2" else "healthy")
        assert set(report["files"]) == {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {
            "report.json"
        }
        stored = next((tmp_path / "store").glob(f"**/profiles/{host}/{folder.name}/py-spy.speedscope.json"))
        assert stored.read_bytes() == (folder / "py-spy.speedscope.json").read_bytes()
