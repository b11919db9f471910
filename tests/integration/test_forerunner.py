"""A container's first worker is a process that was begun while the agent still loaded, where it is sure to be used."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.support.container import Container

pytestmark = pytest.mark.integration

TELL = """
import os, sys
from pathlib import Path

begun = b"KEEPSTEP_FORERUNNER_FD=" in Path("/proc/self/environ").read_bytes()
print("begun before" if begun else "begun afresh", *[n for n in os.environ if "FORERUNNER" in n], *sys.argv[1:])
sys.exit(int(begun and len(sys.argv) > 1))
"""


@pytest.fixture
def container(tmp_path):
    with Container(tmp_path) as made:
        made.fill()
        made.write("code/train.py", TELL)
        yield made


def told(container: Container) -> list[str]:
    return [line.partition("] ")[2] for line in container.said() if "] begun" in line]


def test_the_first_worker_was_begun_before_and_the_next_one_is_not(container):
    container.options += ["train.py", "a b"]
    assert container.run() == 0, container.output()
    assert told(container) == ["begun before a b", "begun afresh a b"]


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$"])
def test_without_it_the_worker_is_started_as_ever(container, tmp_path, end):
    python = tmp_path / "python"
    early = "[ -z $KEEPSTEP_FORERUNNER_FD ]"
    python.write_text(f'#!/bin/sh\n{early} || {end}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    container.options += ["--set", f"launch.python={python}"]
    assert container.run() == 0, container.output()
    assert told(container) == ["begun afresh"]


def test_what_is_no_python_script_is_begun_when_its_world_is_known(container):
    container.write("code/train.sh", "echo begun ${KEEPSTEP_FORERUNNER_FD:-afresh}\n")
    container.options.append("train.sh")
    assert container.run() == 0, container.output()
    assert told(container) == ["begun afresh"]
