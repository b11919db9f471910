"""`keepstep submit` against moto's SageMaker, S3 and CloudWatch: a job is made, followed, its log read along."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import boto3
import pytest

from keepstep.errors import StoreRefusedError
from keepstep.sdk.jobs import LOG_GROUP, Jobs
from tests.support.s3 import CREDENTIALS, s3_server

pytestmark = pytest.mark.integration
RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
ROLE = "arn:aws:iam::123456789012:role/Train"
server = pytest.fixture(scope="module")(s3_server)


def submit(server: str, source: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "keepstep", "submit", "--name", "digits", "--image", "repo/image:1", "--role", ROLE),
        *("--script", "train.py", "--source", str(source), "--output", "s3://models/x", "--region", "us-east-1", *more),
    ]
    environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": server, "PYTHONPATH": str(RUNTIME)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def source(tmp_path, server) -> Path:
    (tmp_path / "train.py").write_text("print('training')\n")
    s3 = boto3.client("s3", endpoint_url=server)
    s3.create_bucket(Bucket="models")
    return tmp_path


def jobs_of(server: str) -> list[str]:
    sagemaker = boto3.client("sagemaker", endpoint_url=server)
    return [each["TrainingJobName"] for each in sagemaker.list_training_jobs()["TrainingJobSummaries"]]


def test_a_job_is_made_and_followed_to_its_end(server, source):
    done = submit(server, source, "--spot", "--tag", "team=vision", "--hyperparameter", "epochs=3")
    assert done.returncode == 0, done.stderr
    assert "Completed" in done.stdout
    (name,) = jobs_of(server)
    found = boto3.client("sagemaker", endpoint_url=server).describe_training_job(TrainingJobName=name)
    assert found["HyperParameters"]["epochs"] == "3"
    packed = boto3.client("s3", endpoint_url=server).get_object(
        Bucket="models", Key=f"x/{name}/source/sourcedir.tar.gz"
    )
    with tarfile.open(fileobj=io.BytesIO(packed["Body"].read())) as tar:
        assert tar.getnames() == ["train.py"]


def test_a_dry_run_makes_nothing(server, source):
    before = jobs_of(server)
    done = submit(server, source, "--dry-run")
    assert done.returncode == 0 and '"TrainingJobName": "digits-' in done.stdout
    assert jobs_of(server) == before


def test_a_bucket_that_is_not_there_is_said(server, source):
    done = submit(server, source, "--output", "s3://none-such/x")
    assert done.returncode == 78
    assert "s3://none-such/x/digits-" in done.stderr and "NoSuchBucket" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_log_of_all_hosts_is_told_once_and_in_order(server, monkeypatch):
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    logs = boto3.client("logs", region_name="us-east-1")
    logs.create_log_group(logGroupName=LOG_GROUP)
    streams = [f"mine/algo-{number}-1700000000" for number in (1, 2)]
    for stream in (*streams, "mine-too/algo-1-1700000000"):
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)

    def put(stream: str, *lines: str) -> None:
        now_ms = int(time.time() * 1000)
        events = [{"timestamp": now_ms + at, "message": line} for at, line in enumerate(lines)]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)

    class Described(Jobs):
        """A job that takes two looks to its end; moto's take none. Another look is not answered."""

        looks = iter([("InProgress", "Training"), ("", "away"), ("InProgress", "Uploading"), ("Failed", "Failed")])

        def describe(self, name):
            status, second = next(self.looks)
            if not status:
                raise StoreRefusedError(second)
            return {"TrainingJobStatus": status, "SecondaryStatus": second, "FailureReason": "user_code"}

    put(streams[0], "one", "two")
    said: list[str] = []
    later = iter([lambda: None, lambda: put(streams[1], "other"), lambda: put(streams[0], "three")])
    found = Described("us-east-1").follow("mine", said.append, lambda: next(later)())
    assert found["FailureReason"] == "user_code"
    assert said == [
        "[algo-1] one", "[algo-1] two", "keepstep submit | InProgress: Training", "keepstep submit | away",
        "[algo-2] other", "keepstep submit | InProgress: Uploading",
        "[algo-1] three", "keepstep submit | Failed: Failed",
    ]  # fmt: skip
