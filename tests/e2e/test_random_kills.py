"""Killed again and again at random, with a store that fails at times, a training ends with the bits of a quiet one.

KEEPSTEP_TEST_ALL=1 kills each form 30 times; else one form is killed a few times.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.torture import RATES
from tests.support.faulty_s3 import FaultyS3
from tests.support.local_run import LocalRun, differences
from tests.support.localstack import localstack
from tests.support.s3 import CREDENTIALS, bucket_store

EVERYTHING = bool(os.environ.get("KEEPSTEP_TEST_ALL"))
KILLS = 30 if EVERYTHING else 3
STEPS = 600 if EVERYTHING else 120
DEADLINE_S = 1200.0 if EVERYTHING else 200.0
"""For one run: on a busy machine a restart may take ten seconds."""
SAMPLES, BATCH = 1797, 64  # of examples/digits.csv.gz, and in a step of jobs/digits.py
FORMS = {
    "digits": ("digits.py", [f"--steps={STEPS}"]),
    "fit": ("fit.py", [f"--epochs={STEPS // 40}", "--shuffle"]),
    "sequence": ("fit.py", [f"--epochs={STEPS // 40}", "--sequence"]),
    "tf_keras": ("fit.py", [f"--epochs={STEPS // 40}", "--shuffle", "--legacy"]),
}
KINDS = ["kill"] * 5 + ["kill-agent", "kill-uploader", "kill-host"]
SETTINGS = (
    "checkpoint.snapshot_every=4 steps", "checkpoint.every=12 steps", "restart.budget=1000 per 1h",
    "restart.same_step=100", "restart.ceiling=1000", "restart.backoff.first=1ms",
)  # fmt: skip

pytestmark = [pytest.mark.e2e, pytest.mark.hosts, pytest.mark.timeout(2400 if EVERYTHING else 400)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with localstack(tmp_path_factory.mktemp("localstack")) as endpoint:
            yield endpoint


def run_of(folder: Path, form: str, *options: str) -> LocalRun:
    script, arguments = FORMS[form]
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return LocalRun(folder, script, arguments, (*settings, *options), deadline_s=DEADLINE_S)


@pytest.mark.parametrize("form", FORMS if EVERYTHING else ["digits"])
def test_the_last_bits_are_those_of_a_quiet_training(
    form: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_of(tmp_path / "quiet", form) as quiet:
        assert quiet.wait() == 0, quiet.told()
    dice = random.Random(f"random kills of {form}")
    last = STEPS - 10  # by then the run is still there to be hurt
    faults = [f"{dice.choice(KINDS)}:{dice.randrange(2)}@{step}" for step in sorted(dice.sample(range(1, last), KILLS))]
    bucket = f"kills-{form.replace('_', '-')}"
    bucket_store(server, bucket)
    with FaultyS3(server, RATES, seed=5) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        options = [word for fault in faults for word in ("--fault", fault)]
        with run_of(tmp_path / "hurt", form, "--store", f"s3://{bucket}", *options) as hurt:
            assert hurt.wait() == 0, hurt.told()
            assert hurt.left() == []
    summary = hurt.summary()
    assert [entry["fault"] for entry in summary["faults"]] == faults, hurt.told()
    assert summary["steps"] == summary["durable_step"] == STEPS
    assert differences(hurt.results(), quiet.results()) == []
    if form == "digits":
        assert_each_sample_once(hurt.folder / "results")


def assert_each_sample_once(folder: Path) -> None:
    """Over all ranks, and however often a step was executed again: with the same samples each time."""
    steps: dict[int, set[tuple[int, tuple[int, ...]]]] = {}
    for rank in (0, 1):
        for line in (folder / f"taken-{rank}.jsonl").read_text().splitlines():
            step, numbers = json.loads(line)
            steps.setdefault(step, set()).add((rank, tuple(numbers)))
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert all(len(taken) == 2 for taken in steps.values())  # one set of samples for each rank
    in_epoch = -(-SAMPLES // BATCH)
    for epoch in range(STEPS // in_epoch):
        numbers: Counter[int] = Counter()
        for step in range(epoch * in_epoch + 1, (epoch + 1) * in_epoch + 1):
            for _, taken in steps[step]:
                numbers.update(taken)
        assert numbers == Counter(range(SAMPLES)), f"epoch {epoch}"
