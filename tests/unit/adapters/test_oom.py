"""Whom the kernel killed for want of memory, by the counters of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.adapters.processes.oom import OomKills


class Machine:
    """A proc and a cgroup file system of straw."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"

    def process(self, pid: int, *groups: str) -> None:
        (self.proc / str(pid)).mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid) / "cgroup").write_text("\n".join(groups) + "\n")

    def count(self, file: str, kills: int) -> None:
        path = self.cgroup / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\noom 7\noom_kill {kills}\noom_group_kill 9\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/box", "box/memory.events"),
        ("0::/docker/abc", "memory.events"),  # a container's own group, mounted at the root
        ("4:cpu,memory:/box", "memory/box/memory.oom_control"),
        ("4:memory:/docker/abc", "memory/memory.oom_control"),
    ],
)
def test_a_kill_in_the_group_is_seen_once(machine, group, file):
    machine.process(7, "5:devices:/elsewhere", group)
    machine.count(file, 3)
    kills = OomKills(machine.proc, machine.cgroup)
    kills.follow(7)
    assert not kills.strike(7)
    machine.count(file, 4)
    assert kills.strike(7)
    assert not kills.strike(7)


def test_who_dies_long_after_a_kill_did_not_die_of_that(machine):
    machine.process(7, "0::/box")
    machine.count("box/memory.events", 3)
    kills = OomKills(machine.proc, machine.cgroup)
    kills.follow(7)
    machine.count("box/memory.events", 4)
    kills.age()
    kills.age()
    assert kills.strike(7), "a large process takes a while to be gone"
    kills.follow(7)
    machine.count("box/memory.events", 5)
    for _ in range(3):
        kills.age()
    assert not kills.strike(7)


def test_where_a_process_was_is_known_when_it_is_dead(machine):
    """Version 1 shows the dead at the root; and whoever was moved meanwhile was seen there."""
    machine.process(7, "4:memory:/box")
    machine.count("memory/box/memory.oom_control", 0)
    machine.count("memory/cage/memory.oom_control", 0)
    machine.count("memory/memory.oom_control", 0)
    kills = OomKills(machine.proc, machine.cgroup)
    kills.follow(7)
    machine.process(7, "4:memory:/cage")
    kills.age()
    machine.count("memory/cage/memory.oom_control", 1)
    machine.process(7, "4:memory:/")
    assert kills.strike(7)


def test_a_group_that_a_process_went_into_later_counts_from_nothing(machine):
    machine.process(7, "0::/")
    machine.count("memory.events", 0)
    kills = OomKills(machine.proc, machine.cgroup)
    kills.follow(7)
    machine.process(7, "0::/own")
    machine.count("own/memory.events", 1)
    assert kills.strike(7)


def test_where_nothing_is_counted_nothing_is_claimed(machine):
    machine.process(7, "0::/box")
    kills = OomKills(machine.proc, machine.cgroup)
    kills.follow(7)
    kills.follow(8)
    assert not kills.strike(7) and not kills.strike(8)
