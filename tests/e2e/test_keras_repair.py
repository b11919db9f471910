"""Keras 3's `fit`, `evaluate` and `predict` on two hosts: broken upstream, sound with the repair."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import tf_configs

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("keras_job.py")
PYTHON = os.environ.get("KEEPSTEP_TF_PYTHON", str(ROOT / ".venv-tf" / "bin" / "python"))
DEADLINE_S = 100

FLOAT32_EPS = 2.0**-23
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def run(tmp_path: Path, *options: str, hosts: int) -> tuple[list[dict[str, Any]], list[int], str]:
    """Train on that many hosts of this machine; 0 means one process that knows of no cluster.

    Returns each rank's result (empty where a rank failed), the exit codes, and what all ranks printed.
    """
    outs = [tmp_path / f"{len(os.listdir(tmp_path))}-{rank}.json" for rank in range(max(1, hosts))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    workers = []
    configs = tf_configs(hosts) or [None]
    for out, config in zip(outs, configs, strict=True):
        if config is not None:
            environment["TF_CONFIG"] = config
        command = [PYTHON, str(JOB), *options, str(out)]
        with out.with_suffix(".log").open("wb") as log:
            workers.append(subprocess.Popen(command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT))
    try:
        for worker in workers:
            worker.wait(timeout=DEADLINE_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return (
        [json.loads(out.read_text()) if out.exists() else {} for out in outs],
        [worker.returncode for worker in workers],
        "".join(out.with_suffix(".log").read_text(errors="replace") for out in outs),
    )


def trained(tmp_path: Path, *options: str, hosts: int) -> list[dict[str, Any]]:
    results, codes, printed = run(tmp_path, *options, hosts=hosts)
    assert set(codes) == {0}, printed[-3000:]
    return results


def rounded(histories: Any) -> Any:
    """The histories with four digits behind the point."""
    return json.loads(json.dumps(histories), parse_float=lambda text: round(float(text), 4))


@pytest.mark.sample(1)
@pytest.mark.parametrize("built", ["built", "lazy"])
def test_two_hosts_train_what_one_process_trains(tmp_path: Path, built: str) -> None:
    options = ["--repair"] + (["--lazy"] if built == "lazy" else [])
    first, second = trained(tmp_path, *options, hosts=2)
    (alone,) = trained(tmp_path, *options, hosts=0)
    for rank in (first, second):
        assert rounded(rank["histories"]) == rounded(alone["histories"])
        # sums in another order: a weight next to zero is known no better than the largest ones that it came from
        rounding = FLOAT32_EPS * max(map(abs, alone["weights"]))
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=rounding)
        assert len(rank["predict"]) == 64
        for row, wanted in zip(rank["predict"], alone["predict"], strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert first["variables"]["trainable"] == second["variables"]["trainable"]


def test_runs_with_dropout_and_batch_norm_repeat_bit_for_bit(tmp_path: Path) -> None:
    first, second = trained(tmp_path, "--repair", "--noisy", hosts=2)
    again = trained(tmp_path, "--repair", "--noisy", hosts=2)
    assert [first, second] == again
    assert first["variables"]["trainable"] == second["variables"]["trainable"]
    assert first["variables"]["optimizer"] == second["variables"]["optimizer"]
    assert first["variables"]["local"] != second["variables"]["local"]  # each rank's own BatchNorm statistics


def test_the_fault_is_still_upstream(tmp_path: Path) -> None:
    _, codes, printed = run(tmp_path, hosts=2)
    assert 0 not in codes
    assert "PerReplica" in printed


def test_one_host_is_left_alone(tmp_path: Path) -> None:
    assert trained(tmp_path, "--repair", "--noisy", hosts=0) == trained(tmp_path, "--noisy", hosts=0)


SOUND = """
import keras.src.backend.tensorflow.trainer as trainer
from keepstep_worker import keras3

def reduce_per_replica(values, strategy, reduction):
    return trainer.tree.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)

def build(self, iterator=None, data_batch=None):
    for _, _, batches in iterator:
        data_batch = trainer.tree.map_structure(lambda v: self.distribute_strategy.reduce("MEAN", v), next(batches))
    self._symbolic_build(data_batch=data_batch)

broken = trainer.TensorFlowTrainer._maybe_symbolic_build, trainer.reduce_per_replica
print(keras3._builds_from_a_structure(trainer, broken[0]), keras3._reduces_scalars_by_axis(trainer, broken[1]))
print(keras3._builds_from_a_structure(trainer, build), keras3._reduces_scalars_by_axis(trainer, reduce_per_replica))
"""


def test_the_probes_tell_a_sound_keras_from_a_broken_one() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run([PYTHON, "-c", SOUND], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["True True", "False False"]
