"""Intermediate output: what a script leaves in the platform's folder is in the bucket while it runs, all at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from keepstep.app.relaying import Relay
from keepstep.errors import StoreRefusedError
from tests.support.s3 import CREDENTIALS
from tests.unit.intake.opt_ml import make_opt_ml

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SCRIPT = """
import os, pathlib, time
folder = pathlib.Path("{base}/output/intermediate")
(folder / "plots").mkdir()
(folder / "plots" / "a b ✓.txt").write_text("first")
(folder / "gone").write_text("x")
while not os.path.exists("{base}/go-on"):
    time.sleep(0.01)
(folder / "plots" / "a b ✓.txt").write_text("second, longer")
(folder / "gone").unlink()
(folder / "last.bin").write_bytes(bytes(6 * 2**20))
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    yield boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"], aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    server.stop()


@pytest.fixture
def bucket(s3: Any) -> str:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


def contents(s3: Any, bucket: str) -> dict[str, int]:
    return {each["Key"]: each["Size"] for each in s3.list_objects_v2(Bucket=bucket).get("Contents", ())}


def start(base: Path, s3: Any, bucket: str) -> subprocess.Popen[bytes]:
    """A job on one host whose script is SCRIPT."""
    given = {"sagemaker_program": '"train.py"', "sagemaker_s3_output": json.dumps(f"s3://{bucket}/out/")}
    make_opt_ml(base, resources={"current_host": "algo-1", "hosts": ["algo-1"]}, hyperparameters=given)
    (base / "code" / "train.py").write_text(SCRIPT.format(base=base))
    words = ["--base-dir", str(base), "--scratch-dir", str(base / "scratch"), "--set", "telemetry.listen=127.0.0.1:0"]
    words += ["--set", f"launch.python={sys.executable}"]
    environment = {
        **os.environ, **CREDENTIALS, "PYTHONPATH": str(ROOT / "runtime"), "TRAINING_JOB_NAME": "digits-7",
        "S3_ENDPOINT_URL": s3.meta.endpoint_url,
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-P", "-m", "keepstep", "train", *words], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def wait_for(look: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not look():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < give_up


def test_files_come_as_they_are_written_and_all_are_there_at_the_end(s3: Any, bucket: str, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    job = start(base, s3, bucket)
    try:
        prefix = "out/digits-7/output/intermediate"
        wait_for(lambda: {f"{prefix}/plots/a b ✓.txt", f"{prefix}/gone"} <= contents(s3, bucket).keys(), job)
        assert contents(s3, bucket)[f"{prefix}/plots/a b ✓.txt"] == 5
        (base / "go-on").touch()
        told, _ = job.communicate(timeout=DEADLINE_S)
    finally:
        job.kill()
    assert job.returncode == 0, told.decode()
    assert contents(s3, bucket) == {
        f"{prefix}/plots/a b ✓.txt": len("second, longer"),
        f"{prefix}/gone": 1,
        f"{prefix}/last.bin": 6 * 2**20,
    }


def test_a_folder_that_is_there_before_is_the_platforms(s3: Any, bucket: str, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    (base / "output" / "intermediate").mkdir(parents=True)
    (base / "go-on").touch()
    job = start(base, s3, bucket)
    told, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, told.decode()
    assert contents(s3, bucket) == {}


def test_a_bucket_that_takes_nothing_is_named_and_fails_no_job(s3: Any, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    job = start(base, s3, "bucket-that-is-not-there")
    (base / "go-on").touch()
    told, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, told.decode()
    assert b"not all intermediate output was uploaded" in told
    assert b"NoSuchBucket" in told


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    given = {"sagemaker_program": "train.py", "sagemaker_s3_output": "https://x"}
    resources = {"current_host": "algo-1", "hosts": ["algo-1"]}
    base = make_opt_ml(tmp_path / "ml", resources=resources, hyperparameters=given)
    words = [
        sys.executable,
        "-P",
        "-m",
        "keepstep",
        "train",
        "--base-dir",
        str(base),
        "--set",
        "telemetry.listen=127.0.0.1:0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    done = subprocess.run([*words, "--scratch-dir", str(base / "scratch"), "--set", f"launch.python={sys.executable}"],
                          env=environment, capture_output=True, timeout=DEADLINE_S)  # fmt: skip
    assert done.returncode == 78, done.stderr
    assert b'sagemaker_s3_output: found "https://x"; wanted s3://bucket/prefix' in done.stdout + done.stderr


def test_a_file_is_uploaded_once_it_is_left_alone_and_again_when_it_was_written_meanwhile(tmp_path: Path) -> None:
    put: list[tuple[str, str]] = []
    trouble: list[str] = []

    def take(path: Path, name: str) -> None:
        put.append((name, path.read_text()))
        if len(put) == 1:
            path.write_text("more than before")
        if trouble:
            raise StoreRefusedError(trouble[0])

    logged: list[str] = []
    relay = Relay(tmp_path, take, logged.append)
    (tmp_path / "a").write_text("one")
    assert (relay.look(), put) == (0, [])
    assert (relay.look(), put) == (0, [("a", "one")])
    relay.look()
    relay.look()
    relay.look()
    assert put == [("a", "one"), ("a", "more than before")]
    trouble.append("SlowDown")
    (tmp_path / "b").write_text("two")
    assert (relay.look(last=True), relay.look(last=True)) == (1, 1)
    assert len(logged) == 1
    trouble.clear()
    assert relay.look(last=True) == 0
    assert put[-1] == ("b", "two")
