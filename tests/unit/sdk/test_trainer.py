"""What the SageMaker SDK is given. That the SDK itself takes it, tests/containers show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import keepstep.sdk
from keepstep.errors import ConfigError
from keepstep.sdk import Keepstep

DRIVER = Path(keepstep.sdk.__file__).parent / "driver" / "keepstep_driver.py"


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    (tmp_path / "mine.yaml").touch()
    return str(tmp_path)


def test_estimators_are_given_the_code_and_what_keepstep_is_to_know(source: str) -> None:
    job = Keepstep("train.py", source, "mine.yaml", "s3://bucket/job", "digits", environment={"A": "1"})
    assert job.estimator() == {
        "entry_point": "train.py",
        "source_dir": source,
        "environment": {
            "KEEPSTEP_POLICY": "mine.yaml",
            "KEEPSTEP_STORE": "s3://bucket/job",
            "KEEPSTEP_JOB_NAME": "digits",
            "A": "1",
        },
    }


def test_estimators_give_knobs_to_the_entrypoint(source: str) -> None:
    told = Keepstep("train.py", source, settings={"checkpoint.every": "2min"}).estimator()
    assert told["container_arguments"] == ["train", "--set", "checkpoint.every=2min"]
    assert told["environment"] == {"KEEPSTEP_POLICY": "default"}


@pytest.mark.parametrize(
    ("script", "policy", "key"), [("none.py", "spot", "script"), ("train.py", "no.yaml", "policy")]
)
def test_files_that_are_not_there_are_named_before_a_job_is_made(
    script: str, policy: str, key: str, source: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Keepstep(script, source, policy)
    assert caught.value.key == key


def test_a_way_that_there_is_not_is_named(source: str) -> None:
    with pytest.raises(ConfigError, match="found 'bash'"):
        Keepstep("train.py", source).model_trainer("bash")  # type: ignore[arg-type]


def test_without_the_sdk_it_says_what_to_install(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    with pytest.raises(ConfigError, match=r"keepstep\[sdk\]"):
        Keepstep("train.py", source).model_trainer()


@pytest.mark.parametrize("settings", [["checkpoint.every=2min"], []])
def test_the_driver_becomes_keepstep_with_the_script_and_the_knobs(settings: list[str], tmp_path: Path) -> None:
    channel, programs = tmp_path / "sm_drivers", tmp_path / "bin"
    (channel / "distributed_drivers").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(DRIVER, channel / "distributed_drivers")
    (channel / "distributed.json").write_text(json.dumps({"settings": settings}))
    (channel / "sourcecode.json").write_text(json.dumps({"entry_script": "train.py"}))
    (programs / "keepstep").write_text('#!/bin/sh\necho "$SAGEMAKER_PROGRAM" "$@"\nexit 3\n')
    (programs / "keepstep").chmod(0o755)
    done = run_driver(channel, programs)
    knobs = [word for setting in settings for word in ("--set", setting)]
    assert (done.stdout.split(), done.returncode) == (["train.py", "train", *knobs], 3)
    (programs / "keepstep").unlink()
    done = run_driver(channel, programs)
    assert done.returncode == 1
    assert "wanted an image with keepstep in it" in done.stderr


def run_driver(channel: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(channel / "distributed_drivers" / DRIVER.name)],
        env={**os.environ, "PATH": str(programs) + ":/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
