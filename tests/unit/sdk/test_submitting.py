"""What becomes of each option of `keepstep submit`, and what is wrong with some."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from keepstep.app import submitting
from keepstep.app.cli import main
from keepstep.errors import ConfigError
from keepstep.sdk import packing
from keepstep.sdk.packing import pack
from keepstep.sdk.request import check_request

ROLE = "arn:aws:iam::123456789012:role/Train"
LEAST = [
    "--name",
    "digits",
    "--image",
    "repo/image:1",
    "--role",
    ROLE,
    "--script",
    "train.py",
    "--output",
    "s3://bucket/x",
]


def words(**changes: str | None) -> list[str]:
    """The least command line, with other values, or without some."""
    pairs = dict(zip(LEAST[::2], LEAST[1::2], strict=True)) | {f"--{name}": value for name, value in changes.items()}
    return [word for name, value in pairs.items() if value is not None for word in (name, value)]


def requested(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    code = main(["submit", *LEAST, *more, "--dry-run"])
    said = capsys.readouterr()
    assert code == 0, said.err
    found: dict[str, object] = json.loads(said.out)
    check_request(found)
    return found


def at(request: object, path: str) -> object:
    for part in path.split("."):
        request = request[int(part)] if isinstance(request, list) else request[part]  # type: ignore[index]
    return request


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "code"
    (folder / "package" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("train.py", "package/inner.py", "package/__pycache__/inner.pyc", ".git/config", "run.sh"):
        (folder / name).write_text(f"{name}\n")
    (folder / "run.sh").chmod(0o755)
    (tmp_path / "mine.yaml").write_text("version: 1\ncheckpoint: {every: 2min}\n")
    monkeypatch.chdir(tmp_path)
    return folder


OPTIONS = {
    "--hyperparameter": (["epochs=3"], "HyperParameters.epochs", "3"),
    "--env": (["NCCL_DEBUG=INFO"], "Environment.NCCL_DEBUG", "INFO"),
    "--input": (["train=s3://b/train"], "InputDataConfig.0.DataSource.S3DataSource.S3Uri", "s3://b/train"),
    "--policy": (["spot"], "Environment.KEEPSTEP_POLICY", "spot"),
    "--set": (["checkpoint.every=2min"], "AlgorithmSpecification.ContainerArguments.2", "checkpoint.every=2min"),
    "--store": (["s3://other/x"], "Environment.KEEPSTEP_STORE", "s3://other/x"),
    "--checkpoints": (["s3://b/files"], "CheckpointConfig.S3Uri", "s3://b/files"),
    "--spot": ([], "EnableManagedSpotTraining", True),
    "--retries": (["3"], "RetryStrategy.MaximumRetryAttempts", 3),
    "--instance-type": (["ml.p4d.24xlarge"], "ResourceConfig.InstanceType", "ml.p4d.24xlarge"),
    "--instance-count": (["4"], "ResourceConfig.InstanceCount", 4),
    "--volume": (["200"], "ResourceConfig.VolumeSizeInGB", 200),
    "--max-run": (["2h"], "StoppingCondition.MaxRuntimeInSeconds", 7200),
    "--keep-alive": (["10min"], "ResourceConfig.KeepAlivePeriodInSeconds", 600),
    "--kms-key": (["key-1"], "OutputDataConfig.KmsKeyId", "key-1"),
    "--encrypt-traffic": ([], "EnableInterContainerTrafficEncryption", True),
    "--metric": ["loss=loss: ([0-9.]+)", "AlgorithmSpecification.MetricDefinitions.0.Regex", "loss: ([0-9.]+)"],
    "--tag": (["team=vision"], "Tags.0.Value", "vision"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_has_its_place_in_the_request(capsys, option):
    values, path, wanted = OPTIONS[option]
    given = [values] if isinstance(values, str) else values
    assert at(requested(capsys, option, *given), path) == wanted


def test_options_that_go_in_pairs(capsys):
    found = requested(capsys, "--spot", "--max-run", "1h", "--max-wait", "3h")
    assert found["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 10_800}
    found = requested(capsys, "--subnet", "subnet-1", "--subnet", "subnet-2", "--security-group", "sg-1")
    assert found["VpcConfig"] == {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}


def test_a_later_job_of_the_same_name_finds_the_checkpoints_of_this_one(capsys):
    """The platform wants another name for each; where checkpoints lie does not depend on it."""
    found = requested(capsys)
    assert str(found["TrainingJobName"]).startswith("digits-20")
    assert found["Environment"] == {
        "KEEPSTEP_JOB_NAME": "digits", "KEEPSTEP_STORE": "s3://bucket/x/keepstep", "KEEPSTEP_POLICY": "default",
        "KEEPSTEP_MAX_RUNTIME": "86400s",
    }  # fmt: skip
    assert "ContainerArguments" not in found["AlgorithmSpecification"]


def test_code_and_policy_travel_together(capsys, source):
    found = requested(capsys, "--source", str(source), "--policy", "mine.yaml")
    url = at(found, "HyperParameters.sagemaker_submit_directory")
    assert url == f"s3://bucket/x/{found['TrainingJobName']}/source/sourcedir.tar.gz"
    assert at(found, "Environment.KEEPSTEP_POLICY") == "keepstep-policy.yaml"
    packed = pack(source, {"keepstep-policy.yaml": b"version: 1\n"})
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        modes = {member.name: member.mode for member in tar}
    assert modes == {"package/inner.py": 0o644, "run.sh": 0o755, "train.py": 0o644, "keepstep-policy.yaml": 0o644}


def test_the_same_code_is_the_same_bytes(source):
    before = pack(source)
    (source / "train.py").touch()
    assert pack(source) == before
    assert len(gzip.decompress(before)) > 0


def test_folders_that_are_links_travel_too(source, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "common.py").write_text("")
    (source / "shared").symlink_to(tmp_path / "shared")
    (tmp_path / "shared" / "back").symlink_to(source)
    with tarfile.open(fileobj=io.BytesIO(pack(source))) as tar:
        assert sorted(tar.getnames()) == ["package/inner.py", "run.sh", "shared/common.py", "train.py"]


BAD: dict[str, tuple[list[str], str]] = {
    "name": (words(name="a_b"), "--name: found 'a_b'; wanted letters, digits and -"),
    "long name": (words(name="x" * 48), "--name"),
    "no name": (words(name=None), "--name"),
    "role": (words(role="admin"), "RoleArn"),
    "role's form": (words(role="arn:aws:iam::12:role/Train-more"), "RoleArn: 'arn:aws:iam::12:role/Train-more' does"),
    "output": (words(output="/tmp/x"), "--output: found '/tmp/x'; wanted s3://bucket/prefix"),
    "store": ([*LEAST, "--store", "/data"], "--store: found '/data'; wanted s3://bucket/prefix, which all hosts reach"),
    "bucket": ([*LEAST, "--store", "s3://UPPER"], "--store: found 's3://UPPER'"),
    "spot without store": ([*LEAST, "--spot", "--store", "none"], "--spot with --store none"),
    "wait without spot": ([*LEAST, "--max-wait", "2h"], "--max-wait without --spot"),
    "short wait": ([*LEAST, "--spot", "--max-wait", "2h"], "--max-wait: found 7200 s; wanted --max-run (86400 s)"),
    "subnet alone": ([*LEAST, "--subnet", "subnet-1"], "wanted both --subnet and --security-group"),
    "warm spot": ([*LEAST, "--spot", "--keep-alive", "10min"], "there are no warm Spot pools"),
    "policy": ([*LEAST, "--policy", "none-such"], "none-such"),
    "policy's file without source": ([*LEAST, "--policy", "mine.yaml"], "--policy: found the file mine.yaml"),
    "knob": ([*LEAST, "--set", "checkpoint.evry=2min"], "checkpoint.evry"),
    "source": ([*LEAST, "--source", "none"], "--script: train.py is not in none"),
    "script": (["--source", "code", *words(script="none.py")], "--script: none.py is not in code"),
    "own hyperparameter": ([*LEAST, "--hyperparameter", "sagemaker_program=x"], "--hyperparameter: found sagemaker_"),
    "pair": ([*LEAST, "--env", "NAME"], "found 'NAME', wanted NAME=VALUE"),
    "time": ([*LEAST, "--max-run", "5"], "--max-run: found '5'"),
    "short time": ([*LEAST, "--max-run", "1min"], "--max-run: found 60 s; wanted 300 s or more"),
    "count": ([*LEAST, "--retries", "31"], "RetryStrategy.MaximumRetryAttempts: 31 is more than 30"),
    "channel": ([*LEAST, "--input", "a b=s3://b/x"], "ChannelName: 'a b' does not match"),
    "channel's place": ([*LEAST, "--input", "train=/data"], "S3Uri: '/data' does not match"),
    "long value": ([*LEAST, "--env", f"X={'x' * 600}"], "Environment.X: 600 is more than 512"),
    "variable": ([*LEAST, "--env", "1X=2"], "Environment.1X"),
    "metrics": ([*LEAST, *(w for n in range(41) for w in ("--metric", f"m{n}=x"))], ": 41 is more than 40"),
    "tag": ([*LEAST, "--tag", f"k={'v' * 300}"], "Tags[0].Value: 300 is more than 256"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_before_anything_is_made(capsys, source, case):
    given, wrong = BAD[case]
    assert main(["submit", *given]) == 78
    said = capsys.readouterr()
    assert wrong in said.err
    assert said.out == ""


def test_patterns_are_read_as_the_service_means_them():
    job = {"TrainingJobName": "a", "RoleArn": ROLE, "OutputDataConfig": {"S3OutputPath": "s3://b"}}
    check_request({**job, "Tags": [{"Key": "größe", "Value": "3 m"}]})
    with pytest.raises(ConfigError, match=r"Tags\[0\]\.Key: 'a\*b' does not match"):
        check_request({**job, "Tags": [{"Key": "a*b", "Value": ""}]})
    with pytest.raises(ConfigError, match='Missing required parameter in input: "RoleArn"'):
        check_request({"TrainingJobName": "a", "OutputDataConfig": {"S3OutputPath": "s3://b"}})


def test_a_folder_of_data_is_no_code(source, monkeypatch):
    monkeypatch.setattr(packing, "BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="code alone"):
        pack(source)


def test_every_option_is_in_one_of_these_tables(capsys):
    parser = argparse.ArgumentParser()
    submitting.add_command(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["submit", "--help"])
    known = {word for word in capsys.readouterr().out.replace(",", " ").split() if word.startswith("--")}
    tested = {word for given, *_ in BAD.values() for word in given if word.startswith("--")} | set(OPTIONS)
    tested.add("--security-group")  # in a pair
    assert known - tested == {"--help", "--region", "--profile", "--no-wait", "--dry-run"}
