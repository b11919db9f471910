"""What a job brings along: code from S3, packages, programs; in a whole `keepstep train`."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.support.container import LOOP, Container
from tests.support.ports import free_port
from tests.support.s3 import CREDENTIALS, s3_server

pytestmark = pytest.mark.integration

SCRIPT = "import os, sys, json; print('ran', json.dumps([sys.argv, os.getcwd(), os.environ['SM_MODULE_DIR']]))\n"
server = pytest.fixture(scope="module")(s3_server)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path) as container:
        container.fill()
        (container.base / "code" / "train.py").unlink()
        yield container


def hyperparameters(container: Container, **values: object) -> None:
    container.write("input/config/hyperparameters.json", json.dumps({"sagemaker_program": "train.py", **values}))


def archive(**files: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py").replace("_sh", ".sh"))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content.encode()))
    return made.getvalue()


def submit(container: Container, server: str, content: bytes, **more: object) -> str:
    """Put an archive where the SDK would, and name it as the SDK does."""
    bucket = f"code-{os.urandom(4).hex()}"
    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="job/source/sourcedir.tar.gz", Body=content)
    url = f"s3://{bucket}/job/source/sourcedir.tar.gz"
    hyperparameters(container, sagemaker_submit_directory=json.dumps(url), sagemaker_region='"us-east-1"', **more)
    container.environment |= {**CREDENTIALS, "S3_ENDPOINT_URL": server}
    return url


def ran(container: Container) -> list[object]:
    line = next(line for line in container.said() if " ran " in line)
    found: list[object] = json.loads(line.partition(" ran ")[2])
    return found


def test_code_is_fetched_from_s3_and_unpacked(container, server):
    url = submit(container, server, archive(train_py=SCRIPT, package__inner_py=""), epochs="3")
    assert container.run() == 0, container.output()
    code = container.base / "code"
    assert ran(container) == [["train.py", "--epochs", "3"], str(code), url]
    assert sorted(path.name for path in code.iterdir()) == ["package", "train.py"]


def test_code_that_is_there_already_is_left_alone(container):
    hyperparameters(container, sagemaker_submit_directory="gs://nobody/looks")
    container.write("code/train.py", SCRIPT)
    assert container.run() == 0, container.output()
    assert [path.name for path in (container.base / "code").iterdir()] == ["train.py"]


def test_what_an_earlier_attempt_left_unfinished_is_fetched_anew(container, server):
    submit(container, server, archive(train_py=SCRIPT))
    container.write("code/.keepstep-unfinished", "")
    container.write("code/half/of/it.py", "")
    assert container.run() == 0, container.output()
    assert [path.name for path in (container.base / "code").iterdir()] == ["train.py"]


def test_code_in_a_folder_or_an_archive_of_a_channel(container):
    channel = container.base / "input" / "data" / "code"
    container.write("input/data/code/sourcedir.tar.gz", archive(train_py=SCRIPT))
    hyperparameters(container, sagemaker_submit_directory=str(channel / "sourcedir.tar.gz"))
    assert container.run() == 0, container.output()
    assert ran(container)[1] == str(container.base / "code")


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        (b"no archive", ("it can not be read",)),
        (archive(**{"..__train_py": SCRIPT}), ("../train.py", "would lie outside of the folder")),
        (archive(other_py=SCRIPT), ("sagemaker_program", "train.py is not there")),
        (None, ("sourcedir.tar.gz", "Not Found")),
    ],
    ids=["no archive", "hostile", "without the script", "no object"],
)
def test_an_archive_that_is_none_is_said(container, server, content, pieces):
    url = submit(container, server, content or b"")
    if content is None:
        bucket, key = url.removeprefix("s3://").split("/", 1)
        boto3.client("s3", endpoint_url=server).delete_object(Bucket=bucket, Key=key)
    assert container.run() == 78
    failure = container.failure() or ""
    assert [piece for piece in ("hyperparameters.json", *pieces) if piece not in failure] == [], failure
    assert not (container.base / "train.py").exists()


@pytest.mark.parametrize("url", ["s3://[bucket/key", "s3://bucket", "s3://a b/key"])
def test_a_url_of_no_object_is_said(container, url):
    hyperparameters(container, sagemaker_submit_directory=url)
    container.environment |= CREDENTIALS
    assert container.run() == 78
    assert f"sagemaker_submit_directory: {'found ' if url == 's3://bucket' else ''}{url}" in (container.failure() or "")


def test_an_s3_that_does_not_answer_is_no_fault_of_the_configuration(container, server):
    submit(container, server, archive(train_py=SCRIPT))
    container.environment["S3_ENDPOINT_URL"] = f"http://127.0.0.1:{free_port()}"
    assert container.run() == 77
    assert "Could not connect" in (container.failure() or "")


# --- packages ---


def wheel(folder: Path, name: str) -> Path:
    """A package of one module, made without a builder."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}.py", "here = 'installed'\n")
        made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def installing(container: Container, tmp_path: Path) -> Container:
    """Packages go into a folder of the test's; none comes from anywhere else."""
    target = tmp_path / "site"
    container.environment |= {"PIP_TARGET": str(target), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    container.write("code/train.py", f"import sys; sys.path.append({str(target)!r})\nimport thing; print(thing.here)\n")
    return container


def test_requirements_are_installed_once_for_all_agents(installing):
    installing.write("code/requirements.txt", "./thing-1.0-py3-none-any.whl\n")
    wheel(installing.base / "code", "thing")
    assert installing.run() == 0, installing.output()
    assert "installed" in installing.output()
    assert "pip: Successfully installed thing-1.0" in installing.output()
    assert installing.run() == 0
    assert "pip:" not in installing.output()


def test_requirements_that_can_not_be_had_are_named(installing):
    installing.write("code/requirements.txt", "no-such-package==1.2.3\n")
    assert installing.run() == 78
    failure = installing.failure() or ""
    wanted = ("code/requirements.txt: pip install -r requirements.txt ended with 1", "no-such-package==1.2.3")
    assert [piece for piece in wanted if piece not in failure] == [], failure


def test_an_interruption_ends_what_is_being_installed(installing):
    """A list of requirements that never comes to its end stands for a network that does not answer."""
    os.mkfifo(installing.base / "code" / "endless.txt")
    installing.write("code/requirements.txt", "-r endless.txt\n")
    installing.start()
    installing.wait_for(lambda: len(installing.left()) >= 4, "pip")
    installing.signal()
    assert installing.wait() == 143
    assert "interrupted by SIGTERM before anything was trained" in (installing.failure() or "")


def test_a_package_is_installed_and_its_module_run(installing, tmp_path):
    """What `pip install .` does is up to the package: here a backend of its own, since none can be fetched."""
    built = wheel(tmp_path, "thing")
    installing.write("code/setup.py", "")
    installing.write(
        "code/pyproject.toml", '[build-system]\nrequires = []\nbuild-backend = "made"\nbackend-path = ["."]\n'
    )
    installing.write(
        "code/made.py",
        "import shutil\ndef build_wheel(folder, *_):\n"
        f"    shutil.copy({str(built)!r}, folder)\n    return {built.name!r}\n",
    )
    assert installing.run() == 0, installing.output()
    assert "installed" in installing.output()
    assert any(event["kind"] == "worker_started" for event in installing.events())


# --- programs ---


def test_a_shell_script_runs_with_the_job_s_arguments_and_exit_code(container):
    container.write("code/run.sh", 'echo "ran <$0> <$1> <$2> in $PWD"\nexit 9\n')
    hyperparameters(container, sagemaker_program="run.sh", name="a b $HOME")
    container.options += ["--set", "restart.budget=0 per 1h"]
    assert container.run() == 9
    assert f"ran <./run.sh> <--name> <a b $HOME> in {container.base / 'code'}" in container.output()


def test_what_joins_within_a_shell_script_is_snapshotted_and_goes_on(container):
    training = LOOP.replace("    PLAN\n", "    died = (here / 'died').exists()\n"
                            "    if (here / 'sealed').exists() and not died:\n"
                            "        (here / 'died').touch()\n        import os; os._exit(3)\n"
                            "    if died and step % 40 == 0: (here / 'enough').touch()\n")  # fmt: skip
    container.write("code/inner.py", training)
    container.write("code/run.sh", f"#!/bin/sh\nset -e\n{sys.executable} -m keepstep_worker inner.py\necho all done\n")
    hyperparameters(container, sagemaker_program="run.sh")
    container.options += ["--set", "checkpoint.snapshot_every=5 steps", "--set", "restart.backoff.first=1ms"]
    container.start()
    container.wait_for(lambda: "snapshot_sealed" in container.reasons(), "snapshot")
    container.write("sealed", "")
    assert container.wait() == 0, container.output()
    assert "all done" in container.output()
    restored = [event for event in container.events() if event["kind"] == "worker_restored"]
    assert len(restored) == 1 and restored[0]["step"] > 0 and restored[0]["step"] % 5 == 0
    assert not [event for event in container.events() if event["kind"].startswith("standby")]


@pytest.mark.parametrize(("how", "words"), [("exec", ["a b $MARK"]), ("shell", ["a", "b", "it"])])
def test_arguments_are_as_they_are_or_as_a_shell_makes_them(container, how, words):
    container.write("code/train.py", SCRIPT)
    hyperparameters(container, name="a b $MARK")
    container.environment["MARK"] = "it"
    container.options += ["--set", f"launch.arguments={how}"]
    assert container.run() == 0, container.output()
    assert ran(container)[0] == ["train.py", "--name", *words]


def test_arguments_that_no_shell_understands(container):
    container.write("code/train.py", SCRIPT)
    hyperparameters(container, name="it's")
    container.options += ["--set", "launch.arguments=shell"]
    assert container.run() == 78
    assert "launch.arguments: the shell says" in (container.failure() or "")
