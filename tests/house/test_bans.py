"""Clocks, sleeps, the environment, randomness and pickle stay behind the doors made for them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.house.imports import imports_of
from tests.house.source import ROOT, label, nodes, python_files, run_tool

# A file that may do what the rest may not, beyond those named in pyproject.toml: each with the reason.
GRANTED: dict[str, str] = {}

# The only two places that may catch everything: where a programming error has to become an exit code.
CATCH_ALL = {"runtime/keepstep/app/executor.py", "runtime/keepstep/app/cli.py"}


@pytest.mark.parametrize(
    "line",
    [
        "import time\ntime.time()",
        "from time import monotonic",
        "import time as clock\nclock.sleep(1)",
        "import asyncio\nasyncio.sleep(1)",
        "import datetime\ndatetime.datetime.now()",
        "from os import environ",
        "import os\nos.getenv('HOME')",
        "import random\nrandom.random()",
        "from random import choice",
        "import pickle",
    ],
)
@pytest.mark.parametrize(
    ("room", "banned"),
    [("runtime/keepstep/core/decide.py", True), ("runtime/keepstep/adapters/clock.py", False)],
)
def test_ruff_knows_what_is_banned_and_where(room, banned, line):
    found = run_tool(
        "ruff", "check", "--no-cache", "--select", "TID251", "--stdin-filename", room, "-", stdin=line + "\n"
    )
    assert ("TID251" in found.stdout) is banned, found.stdout + found.stderr


def test_no_banned_call_hides_behind_a_comment():
    found = run_tool(
        "ruff", "check", "--no-cache", "--select", "TID251", "--ignore-noqa", "--output-format", "json", "runtime"
    )
    hits = {
        f"{label(Path(hit['filename']), hit['location']['row'])} {hit['message']}" for hit in json.loads(found.stdout)
    }
    assert {hit for hit in hits if hit.partition(":")[0] not in GRANTED} == set()


def test_every_grant_is_used():
    assert [name for name in GRANTED if not (ROOT / name).is_file()] == []


def test_only_the_simulation_draws_at_random():
    drawn = [
        label(path, found.line)
        for path in python_files("runtime/keepstep")
        for found in imports_of(path)
        if found.top == "random"
    ]
    assert [place for place in drawn if not place.startswith("runtime/keepstep/simulation/")] == []


def test_only_the_boundaries_catch_everything():
    caught = [
        label(path, node.lineno)
        for path in python_files("runtime/keepstep")
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
    ]
    assert [place for place in caught if place.partition(":")[0] not in CATCH_ALL] == []


def test_mocks_stay_in_the_integration_tests():
    patched = [
        label(path)
        for path in python_files("tests")
        if not path.is_relative_to(ROOT / "tests" / "integration")
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom | ast.Import)
        and any(name.name in {"mock", "unittest.mock"} for name in node.names)
    ]
    assert patched == []


def test_quick_tests_do_not_sleep():
    slept = [
        label(path, node.lineno)
        for path in python_files("tests/unit", "tests/scenarios", "tests/simulation")
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep", "asyncio.sleep"}
    ]
    assert slept == []
