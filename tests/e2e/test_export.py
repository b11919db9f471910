"""`keepstep checkpoint export`: what was trained here is loaded by TensorFlow and Keras, without keepstep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.local_run import JOBS, PYTHON, ROOT, LocalRun

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400)]

ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT / "runtime")}
JOB_OF = {
    "fitted": ("fit.py", ["--epochs", "1", "--pause", "0"]),
    "fitted_legacy": ("fit.py", ["--epochs", "1", "--pause", "0", "--legacy"]),
    "looped": ("loop.py", ["--steps", "20", "--pause", "0"]),
}


@pytest.fixture(scope="module", params=list(JOB_OF))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job of two hosts that is done: its builder, and its folder with store and results."""
    folder = tmp_path_factory.mktemp(request.param)
    script, arguments = JOB_OF[request.param]
    with LocalRun(folder / "run", script, arguments, ["--store", str(folder / "store")]) as run:
        assert run.wait() == 0, run.told()
    return request.param, folder


def export(folder: Path, builder: str, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ["--python", PYTHON, "--builder", f"{JOBS / 'builders.py'}:{builder}", "--to", str(target), *more]
    return subprocess.run(
        [sys.executable, "-m", "keepstep", "checkpoint", "export", str(folder / "store"), *words],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def compared(builder: str, path: Path, folder: Path) -> dict[str, int]:
    """How many variables of each group were loaded, and are those that the ranks ended with."""
    legacy = ["--legacy"] if builder == "fitted_legacy" else []
    ranks = [str(folder / "run" / "results" / f"{rank}.npz") for rank in range(2)]
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("load_exported.py")), builder, str(path), *ranks, *legacy],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    groups = (word.partition("=") for word in done.stdout.splitlines()[-1].split())
    return {group: int(count) for group, _, count in groups}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras", "state"])
def test_what_is_exported_is_what_was_trained(trained: tuple[str, Path], name: str, tmp_path: Path) -> None:
    builder, folder = trained
    done = export(folder, builder, tmp_path / name)
    assert done.returncode == 0, done.stderr
    counts = compared(builder, tmp_path / name, folder)
    assert counts["trainable"] == 6 and counts["other"] >= 2  # two Dense, BatchNorm and its statistics
    if name == "state" or (name == "model.keras" and builder != "looped"):
        assert counts["optimizer"] >= 2 * 6  # Adam's
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_builder_of_another_model_is_told_what_does_not_fit(tmp_path: Path) -> None:
    arguments = JOB_OF["looped"][1]
    with LocalRun(tmp_path / "run", "loop.py", arguments, ["--store", str(tmp_path / "store")], hosts=1) as run:
        assert run.wait() == 0, run.told()
    target = tmp_path / "model.keras"
    target.write_bytes(b"what was there")
    for builder, text in (
        ("narrower", "different: "),
        ("unbuilt", "wanted a model that is built"),
        ("none", "has no function none"),
    ):
        done = export(tmp_path, builder, target)
        assert done.returncode == 78 and text in done.stderr, (builder, done.stderr)
        assert target.read_bytes() == b"what was there"
