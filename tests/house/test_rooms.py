"""Rooms have locked doors, and a sign on each."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.house.imports import imports_of
from tests.house.source import AGENT, WORKER, label, python_files, run_tool, tree

ROOMS = ("core", "intake", "adapters", "checkpoint", "simulation", "app")

# Found in the user's interpreter, and imported only once the user's script has: never on loading.
GUEST_MAY_IMPORT_LAZILY = {"tensorflow", "keras", "tf_keras", "numpy"}


def test_the_doors_are_locked():
    checked = run_tool("lint-imports", "--no-cache", "--no-logo")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_stands(room):
    assert (AGENT / room / "__init__.py").is_file()


def test_every_package_has_a_sign():
    """A sign says what lives here, what must never enter, and where to start reading."""
    unsigned = []
    for path in python_files("runtime"):
        if path.name == "__init__.py":
            sign = (ast.get_docstring(tree(path)) or "").lower()
            if "never" not in sign or "start" not in sign:
                unsigned.append(label(path))
    assert unsigned == []


@pytest.mark.parametrize("name", ["init.py", "kernel.py"])
def test_init_needs_nothing_but_the_standard_library(name):
    allowed = ("keepstep.kernel", "keepstep.errors", "keepstep.__version__", "keepstep_worker.wire")
    imported = imports_of(AGENT / name)
    assert imported
    foreign = [found for found in imported if found.top not in sys.stdlib_module_names]
    assert [f"{found.line} {found.module}" for found in foreign if not found.module.startswith(allowed)] == []


def test_the_guest_loads_nothing_but_the_standard_library():
    foreign = []
    for path in python_files("runtime/keepstep_worker"):
        for found in imports_of(path):
            known = sys.stdlib_module_names | {"keepstep_worker"} | (GUEST_MAY_IMPORT_LAZILY if found.lazy else set())
            if found.top not in known:
                foreign.append(f"{label(path, found.line)} {found.module}")
    assert foreign == []


def test_the_agent_takes_only_the_wire_from_the_guest():
    taken = [
        f"{label(path, found.line)} {found.module}"
        for path in python_files("runtime/keepstep")
        for found in imports_of(path)
        if found.top == "keepstep_worker" and not (found.module + ".").startswith("keepstep_worker.wire.")
    ]
    assert [line for line in taken if not line.endswith(" keepstep_worker")] == []


def test_the_guest_avoids_names_that_python_3_9_lacks():
    """Annotations are never evaluated, and what is newer than 3.9 in the standard library is left alone."""
    newer = {
        "tomllib",
        "asyncio.TaskGroup",
        "asyncio.timeout",
        "asyncio.Runner",
        "enum.StrEnum",
        "typing.Self",
        "typing.assert_never",
    }
    for path in python_files("runtime/keepstep_worker"):
        ast.parse(path.read_text(), feature_version=(3, 9))
        imported = imports_of(path)
        assert {found.module for found in imported} & newer == set(), label(path)
        if path.stat().st_size and any(
            True for node in ast.walk(tree(path)) if isinstance(node, ast.AnnAssign | ast.arg)
        ):
            assert any(found.module == "__future__.annotations" for found in imported), label(path)
    assert WORKER.is_dir()
