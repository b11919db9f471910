"""What a rank has computed in a step has a fingerprint: in TensorFlow's graphs, of `fit` and of custom loops."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from keepstep_worker import fingerprint
from tests.e2e.test_fit_resume import Job
from tests.e2e.test_loop_resume import PYTHON, ROOT, train
from tests.support.fake_agent import FakeAgent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

KNOB = {"KEEPSTEP_FINGERPRINT": "on"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("fingerprints") / "told.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run([PYTHON, str(ROOT / "tests/e2e/fingerprint_job.py"), str(out)], env=environment, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_same_gradients_have_the_same_fingerprint(told: dict[str, Any]) -> None:
    value, why = told["whole"]
    assert (len(value), why) == (16, "")
    for name in ("again", "traced anew", "after a step that was not looked at", "eager"):
        assert told[name] == told["whole"], name
    assert told["sparse"][0] == told["sparse"][1]


def test_any_other_bit_or_place_makes_another_one(told: dict[str, Any]) -> None:
    others = [*told["flipped"], told["swapped"], told["other order"], told["not a number"], told["none"]]
    others += [told["empty"], *told["half"], *told["negative zero"], *told["sparse"][1:]]
    values = {value for value, _ in others} - {""}
    assert len(values) == len(others)
    assert told["whole"][0] not in values


def test_graphs_of_jobs_without_the_knob_have_nothing_of_it(told: dict[str, Any]) -> None:
    assert told["ops without the knob"] == told["ops without determinism"] == []
    assert "Fingerprint" in told["ops"]


def test_why_there_is_none(told: dict[str, Any]) -> None:
    assert told["loose"] == ["", fingerprint.NOT_DETERMINISTIC]
    assert told["jit alone"] == ["", fingerprint.COMPILED]


@pytest.mark.parametrize("options", [(), ("legacy",)])
def test_custom_loops_tell_it_of_the_step_that_is_wanted(tmp_path: Path, options: tuple[str, ...]) -> None:
    values = []
    for _ in range(2):
        agent = FakeAgent()
        try:
            _, codes = train(tmp_path, 6, *options, agents=[agent], told=KNOB, snapshot_every=2, fingerprint=5)
            assert codes == [0]
            (message,) = agent.of("fingerprint")
            values.append((message["step"], message["value"], message["why"]))
        finally:
            agent.close()
    assert values[0] == values[1]
    assert (values[0][0], len(values[0][1]), values[0][2]) == (5, 16, "")


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("flavour", "case"), [("keras3", "executions"), ("keras3", "watched"), ("tf_keras", "watched")]
)
def test_fit_tells_it_of_the_step_that_is_wanted(tmp_path: Path, flavour: str, case: str) -> None:
    values = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with contextlib.closing(Job(tmp_path / str(number), flavour, case)) as job:
            job.start(**KNOB)
            job.agent.order(fingerprint=7)
            job.finish()
            (message,) = job.agent.of("fingerprint")
            values.append((message["step"], message["value"], message["why"]))
    assert values[0] == values[1]
    assert (values[0][0], len(values[0][1]), values[0][2]) == (7, 16, "")


def test_without_op_determinism_the_agent_is_told_why_not(tmp_path: Path) -> None:
    agent = FakeAgent()
    try:
        train(tmp_path, 3, "loose", agents=[agent], told=KNOB, snapshot_every=2, fingerprint=2)
        (message,) = agent.of("fingerprint")
    finally:
        agent.close()
    assert (message["value"], message["why"]) == ("", fingerprint.NOT_DETERMINISTIC)
