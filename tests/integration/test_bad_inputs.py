"""What comes in wrong: a whole `keepstep train` says it in one line, exits with the documented code, leaves nothing.

Each row starts a real init and agent on a container's folder with one thing wrong in it. The script is a few lines of
Python; what TensorFlow does with a failure is shown elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.container import LOOP, Container, resources
from tests.support.s3 import CREDENTIALS, s3_server

pytestmark = pytest.mark.integration

POLICY = "version: 1\nlaunch:\n  strategy: plain\n"

Prepare = Callable[[Container], None]


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        prepare: spoils a container in which nothing is wrong.
        code: the documented exit code.
        pieces: what the one line names.
    """

    prepare: Prepare
    code: int
    pieces: tuple[str, ...]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path) as container:
        container.fill()
        yield container


def test_nothing_is_wrong_to_begin_with(container):
    assert container.run() == 0, container.output()
    assert "the script ran" in container.output()
    assert container.failure() is None


# --- parsing: nothing is started -------------------------------------------------------------------------------------


def content(name: str, text: str | bytes) -> Prepare:
    return lambda container: container.write(name, text)


def hosts(text: str | bytes) -> Prepare:
    return content("input/config/resourceconfig.json", text)


def parameters(text: str) -> Prepare:
    return content("input/config/hyperparameters.json", text)


def options(*words: str) -> Prepare:
    return lambda container: container.options.extend(words)


def knob(override: str) -> Prepare:
    return options("--set", override)


def policy(text: str) -> Prepare:
    def prepare(container: Container) -> None:
        container.write("policy.yaml", text)
        container.options += ["--policy", str(container.base / "policy.yaml")]

    return prepare


def script(text: str) -> Prepare:
    return content("code/train.py", text)


def directory_for_a_script(container: Container) -> None:
    (container.base / "code" / "train.py").unlink()
    (container.base / "code" / "train.py").mkdir()


def dangling_script(container: Container) -> None:
    (container.base / "code" / "train.py").unlink()
    (container.base / "code" / "train.py").symlink_to("none.py")


def unreadable_script(container: Container) -> None:
    container.powerless = True
    (container.base / "code" / "train.py").chmod(0)


def taken_port(container: Container) -> None:
    port = container.kept.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
    container.options += ["--set", f"telemetry.listen=127.0.0.1:{port}"]


def no_common_store(container: Container) -> None:
    container.write("input/config/resourceconfig.json", resources(hosts=["algo-1", "algo-2"]))


def no_etcd(container: Container) -> None:
    no_common_store(container)
    container.options += ["--set", "coordination.tls=off"]
    container.write("bin/empty", "")
    container.environment["PATH"] = str(container.base / "bin")


def file_for_a_folder(option: str) -> Prepare:
    def prepare(container: Container) -> None:
        container.write("taken", "a file\n")
        container.options += [option, str(container.base / "taken" / "folder")]

    return prepare


PARSING: dict[str, Case] = {
    "hosts: malformed": Case(hosts('{"hosts": ["algo-1"],\n oops}'), 78, ("resourceconfig.json:2", "malformed JSON")),
    "hosts: truncated": Case(hosts('{"hosts": ["algo-1"'), 78, ("resourceconfig.json:1", "ends in mid-value")),
    "hosts: empty file": Case(hosts(""), 78, ("resourceconfig.json", "empty")),
    "hosts: not UTF-8": Case(hosts(b'{"hosts": "\xff"}'), 78, ("resourceconfig.json:1", "0xff")),
    "hosts: missing": Case(hosts('{"current_host": "algo-1"}'), 78, ("resourceconfig.json", "hosts", "missing")),
    "hosts: none": Case(hosts('{"current_host": "a", "hosts": []}'), 78, ("resourceconfig.json:1", "hosts")),
    "hosts: duplicate": Case(
        hosts('{"current_host": "a",\n"hosts": ["a", "b", "a"]}'), 78, ("resourceconfig.json:2", '"a" twice')
    ),
    "hosts: a stranger": Case(
        hosts('{"hosts": ["algo-1"],\n"current_host": "algo-3"}'),
        78,
        ("resourceconfig.json:2", "current_host", "algo-3"),
    ),
    "hosts: no file": Case(
        lambda c: (c.base / "input/config/resourceconfig.json").unlink(), 78, ("resourceconfig.json", "missing")
    ),
    "hyperparameters: truncated": Case(parameters('{"a": "1",'), 78, ("hyperparameters.json:1", "ends in mid-value")),
    "hyperparameters: a list": Case(parameters('["a"]'), 78, ("hyperparameters.json:1", "a JSON object")),
    "hyperparameters: no script": Case(parameters("{}"), 78, ("SCRIPT", "no script is named", "sagemaker_program")),
    "hyperparameters: a number for a script": Case(
        parameters('{"sagemaker_program": 7}'), 78, ("hyperparameters.json", "sagemaker_program", "found 7")
    ),
    "channels: malformed": Case(
        content("input/config/inputdataconfig.json", '{"train": 5}'), 78, ("inputdataconfig.json:1", "train")
    ),
    "script: absent": Case(lambda c: (c.base / "code/train.py").unlink(), 78, ("sagemaker_program", "train.py")),
    "script: a dangling link": Case(dangling_script, 78, ("sagemaker_program", "train.py")),
    "script: a directory": Case(directory_for_a_script, 78, ("sagemaker_program", "train.py is a directory")),
    "script: unreadable": Case(unreadable_script, 78, ("sagemaker_program", "train.py", "Permission denied")),
    "policy: absent": Case(options("--policy", "/none/p.yaml"), 78, ("/none/p.yaml", "no such file or preset")),
    "policy: no such preset": Case(options("--policy", "spto"), 78, ("spto", "no such file or preset", "spot")),
    "policy: unknown knob": Case(
        policy(POLICY + "restart:\n  ceilling: 3\n"), 78, ("policy.yaml:5", "restart.ceilling", "restart.ceiling")
    ),
    "policy: no unit": Case(policy(POLICY + "coordination: {lease: 5}\n"), 78, ("policy.yaml:4", "coordination.lease")),
    "policy: out of range": Case(
        policy(POLICY + "coordination: {lease: 2min}\n"), 78, ("policy.yaml:4", "coordination.lease", "1s to 1min")
    ),
    "policy: a contradiction": Case(
        policy(POLICY + "restart: {backoff: {first: 2min}}\n"), 78, ("policy.yaml:4", "restart.backoff.first")
    ),
    "policy: not YAML": Case(policy(POLICY + "restart: {\n"), 78, ("policy.yaml:5", "malformed YAML")),
    "policy: a store that is none": Case(
        policy(POLICY + "checkpoint: {store: 'gs://bucket/job'}\n"), 78, ("policy.yaml:4", "checkpoint.store")
    ),
    "command line: an unknown option": Case(options("--polcy", "spot"), 78, ("command line", "--polcy")),
    "command line: no value": Case(options("--port-base", "many"), 78, ("command line", "--port-base", "many")),
    "command line: an override that is none": Case(knob("restart.ceiling"), 78, ("--set", "KNOB=VALUE")),
    "policy: an interpreter that is not there": Case(
        knob("launch.python=/none/python"), 78, ("launch.python", "/none/python")
    ),
    "policy: an interpreter that is no program": Case(
        knob("launch.python=train.py"), 78, ("launch.python", "train.py")
    ),
    "command line: a store that is none": Case(options("--store", "s3://"), 78, ("--store", "s3://")),
    "host: port taken": Case(taken_port, 78, ("telemetry.listen", "in use", "port 0")),
    "host: scratch is a file": Case(file_for_a_folder("--scratch-dir"), 78, ("--scratch-dir", "taken")),
    "hosts: no store in common": Case(no_common_store, 78, ("coordination.tls", "--store", "coordination.tls=off")),
    "host: no etcd": Case(no_etcd, 75, ("etcd is not on PATH", "apt-get install etcd-server")),
}


@pytest.mark.parametrize("name", PARSING)
def test_what_can_not_be_used_is_said_in_one_line(container, name):
    case = PARSING[name]
    case.prepare(container)
    assert container.run() == case.code, container.output()
    said = container.said()
    assert [line for line in said if not line.startswith("  hint: ")] == said[:1] and len(said) <= 2, said
    assert [piece for piece in case.pieces if piece not in "\n".join(said)] == []
    assert container.failure() == "\n".join(said).removeprefix("keepstep | ")
    assert "the script ran" not in container.output()


# --- running: a worker was started, or something was asked of the store ----------------------------------------------


def full_store(container: Container) -> None:
    container.full_disks.append(container.folder("store"))
    container.options += ["--store", str(container.base / "store")]


def locked_store(container: Container) -> None:
    container.powerless = True
    container.folder("store").chmod(0o555)
    container.options += ["--store", str(container.base / "store")]


def silent_store(container: Container) -> None:
    """Nothing listens there."""
    container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    container.options += ["--store", "s3://bucket/job", "--set", "elastic.wait_for_return=5s"]


def lost_bucket(container: Container) -> None:
    endpoint = container.kept.enter_context(contextlib.contextmanager(s3_server)())
    container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
    container.options += ["--store", "s3://no-such-bucket/job"]


FAILING: dict[str, Case] = {
    "script: exits with a code": Case(script("raise SystemExit(3)\n"), 3, ("user_code", "exit code 3")),
    "script: dies of SIGSEGV": Case(
        script("import os\nos.kill(os.getpid(), 11)\n"), 139, ("killed", "algo-1 rank 0", "signal 11")
    ),
    "script: raises": Case(script("raise KeyError('no such column')\n"), 1, ("KeyError", "no such column")),
    "script: is no Python": Case(script("train the model\n"), 1, ("SyntaxError",)),
    "script: wants what is not installed": Case(script("import no_such_thing\n"), 1, ("no_such_thing",)),
    "script: raises at length": Case(script("raise ValueError('ü' * 10_000)\n"), 1, ("ValueError", "ü")),
    "store: a file": Case(file_for_a_folder("--store"), 77, ("the store refuses", "taken")),
    "store: read-only": Case(locked_store, 77, ("the store refuses", "Permission denied")),
    "store: on a full disk": Case(full_store, 77, ("the store refuses", "No space left on device")),
    "store: does not answer": Case(silent_store, 77, ("the store can not be read",)),
    "store: no such bucket": Case(lost_bucket, 77, ("the store refuses", "no-such-bucket")),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_ends_the_job_with_its_first_cause(container, name):
    case = FAILING[name]
    case.prepare(container)
    assert container.run() == case.code, container.output()
    failure = container.failure()
    assert failure is not None and [piece for piece in case.pieces if piece not in failure] == [], failure
    assert [line for line in container.said() if line.startswith("Traceback")] == [], container.output()
    assert container.said()[-1] == f"keepstep algo-1 | exit {case.code}"
    starts = container.reasons().count("worker_starts")
    # what the script raises itself it would raise again; who is killed is tried as often as `restart.same_step` says
    assert starts == (0 if case.code == 77 else 3 if case.code > 128 else 1)


CRASH = """
    if (here / "sealed").exists() and not (here / "crash_at").exists():
        (here / "crash_at").write_text(str(step))
    if (here / "crash_at").exists() and step == int((here / "crash_at").read_text()):
        raise ArithmeticError("nan")
"""


def test_a_crash_at_one_step_after_progress_is_the_script_s_own(container):
    """Training comes as far each time, from its snapshot; that does not make it another failure."""
    container.write("code/train.py", LOOP.replace("PLAN", CRASH.strip()))
    container.options += ["--set", "checkpoint.snapshot_every=2 steps"]
    container.start()
    container.wait_for(lambda: "snapshot_sealed" in container.reasons(), "snapshot")
    container.write("sealed", "")
    assert container.wait() == 1, container.output()
    step = (container.base / "crash_at").read_text()
    assert "same_step_again" in str(container.failure()) and f"at step {step}" in str(container.failure())
    assert "ArithmeticError: nan" in str(container.failure())
    assert container.reasons().count("resume_from_slabs") == 2
