"""One version, one list of dependencies, and every pin with its digests."""

from __future__ import annotations

import re
import tomllib

import pytest

import keepstep
import keepstep_worker
from tests.house.source import ROOT, WORKER

REQUIREMENTS = ROOT / "requirements"


def wanted(name: str) -> set[str]:
    lines = (line.strip() for line in (REQUIREMENTS / name).read_text().splitlines())
    return {line for line in lines if line and not line.startswith(("#", "-"))}


def pins(name: str) -> dict[str, tuple[str, int]]:
    """Return version and number of digests by distribution."""
    text = (REQUIREMENTS / name).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            distribution, version = re.match(r"([\w.\-]+)==([\w.+!]+)", line).groups()
            found[distribution] = (version, line.count("--hash=sha256:"))
    return found


def bare(requirement: str) -> str:
    return re.match(r"[\w.\-]+", requirement).group().lower().replace("_", "-")


def test_both_distributions_have_one_version():
    assert keepstep.__version__ == keepstep_worker.__version__
    worker = tomllib.loads((WORKER / "pyproject.toml").read_text())
    assert worker["project"]["dynamic"] == ["version"]


def test_the_pinned_agent_is_the_declared_one():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {line.lower() for line in declared} == {line.lower() for line in wanted("agent.in")}


@pytest.mark.parametrize("name", ["agent", "build", "dev", "tensorflow", "tf-keras"])
def test_every_requirement_is_pinned_with_digests(name):
    pinned = pins(f"{name}.txt")
    assert {bare(line) for line in wanted(f"{name}.in")} <= set(pinned)
    assert {distribution for distribution, (_, digests) in pinned.items() if not digests} == set()
    assert {distribution for distribution in pinned if distribution.startswith("torch")} == set()


def test_the_tools_run_beside_the_agent_that_is_shipped():
    agent, dev = pins("agent.txt"), pins("dev.txt")
    assert {name: dev.get(name) for name in agent} == agent
