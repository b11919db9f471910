"""A container's first worker is a process that was begun while the agent still loaded, where it is sure to be used."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from dataclasses import replace

import pytest

from keepstep.adapters.processes import ProcessHost, WorkerSpec, launch, standard_sinks
from keepstep.app.forerunner import Forerunner
from keepstep.app.standing_by import Standbys
from tests.support.container import RUNTIME, Container

pytestmark = pytest.mark.integration

TELL = """
import os, sys
from pathlib import Path

begun = b"KEEPSTEP_FORERUNNER_FD=" in Path("/proc/self/environ").read_bytes()
told = "begun before" if begun else "begun afresh"
print(told, *[n for n in os.environ if "FORERUNNER" in n], *sys.argv[1:], flush=True)
if begun and len(sys.argv) > 1:
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def container(tmp_path):
    with Container(tmp_path) as made:
        made.fill()
        made.write("code/train.py", TELL)
        yield made


class Unused(ProcessHost):
    """A host that nobody may start a worker on."""

    def __init__(self) -> None:
        pass


unused = Unused()


def waiting(worker: WorkerSpec) -> Forerunner:
    """A forerunner whose process runs a worker's command."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return Forerunner(worker, launch(replace(worker, held=True), standard_sinks()), ours)


def told(container: Container) -> list[str]:
    return [line.partition("] ")[2] for line in container.said() if "] begun" in line]


def test_the_first_worker_was_begun_before_and_the_next_one_is_not(container):
    container.options += ["train.py", "a b"]
    assert container.run() == 0, container.output()
    assert told(container) == ["begun before a b", "begun afresh a b"]


@pytest.mark.parametrize("command", ["exit 3", "kill -9 $$"])
def test_one_that_has_ended_is_no_worker(command):
    worker = WorkerSpec("w", ("sh", "-c", command), {"PATH": os.environ["PATH"]}, "")
    begun = waiting(worker)
    begun.started.process.wait()
    assert Standbys("h", lambda event: None, begun).take("", worker, unused) is None


def test_one_of_another_command_is_no_worker():
    worker = WorkerSpec("w", ("sh", "-c", "read line"), {"PATH": os.environ["PATH"]}, "")
    begun = waiting(worker)
    assert Standbys("h", lambda event: None, begun).take("", replace(worker, argv=("sh",)), unused) is None
    begun.started.process.wait()


def test_what_the_interpreter_finds_beside_the_agents_environment_stays(container, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['FORERUNNER_MORE'] = 'x'\n")
    container.environment["PYTHONPATH"] = f"{RUNTIME}:{tmp_path}"
    assert container.run() == 0, container.output()
    assert told(container) == ["begun before FORERUNNER_MORE"]


def test_an_interpreter_that_is_a_script_is_started_for_the_worker_alone(container, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n: ${{KEEPSTEP_RANK:?}}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    container.options += ["--set", f"launch.python={python}"]
    assert container.run() == 0, container.output()
    assert told(container) == ["begun afresh"]


def test_what_is_no_python_script_is_begun_when_its_world_is_known(container):
    container.write("code/train.sh", "echo begun ${KEEPSTEP_FORERUNNER_FD:-afresh}\n")
    container.options.append("train.sh")
    assert container.run() == 0, container.output()
    assert told(container) == ["begun afresh"]
