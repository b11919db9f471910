"""What is left of the memory: of the host, and of the control groups above a process, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_worker import memory

MIB = 1 << 20


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with 100 MiB left whose processes say which groups they are in by `groups`."""
    meminfo, groups = tmp_path / "meminfo", tmp_path / "groups"
    meminfo.write_text("MemTotal:  999999 kB\nMemAvailable:  102400 kB\nHugePages_Total:  0\n")
    groups.write_text("")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_OWN_GROUPS", groups)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    memory._places.cache_clear()
    yield tmp_path
    memory._places.cache_clear()


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_without_a_group_the_host_says_it(host):
    assert memory.left_bytes() == 100 * MIB
    assert memory.has_room(60 * MIB)
    assert not memory.has_room(70 * MIB), "half as much again is to be left"


def test_the_groups_above_count_in_version_2(host):
    (host / "groups").write_text("0::/job/worker\n")
    group(host / "cgroup" / "job" / "worker", {"memory.max": "max\n", "memory.current": f"{5 * MIB}\n"})
    group(host / "cgroup" / "job", {
        "memory.max": f"{50 * MIB}\n", "memory.current": f"{30 * MIB}\n",
        "memory.stat": f"anon {20 * MIB}\ninactive_file {6 * MIB}\nactive_file {4 * MIB}\n",
    })  # fmt: skip
    assert memory.left_bytes() == 30 * MIB


def test_the_groups_above_count_in_version_1(host):
    (host / "groups").write_text("9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    group(host / "cgroup" / "memory" / "a", {
        "memory.limit_in_bytes": f"{40 * MIB}\n", "memory.usage_in_bytes": f"{38 * MIB}\n", "memory.stat": "",
    })  # fmt: skip
    assert memory.left_bytes() == 2 * MIB


def test_what_is_mounted_as_a_containers_own_root_counts(host):
    (host / "groups").write_text("0::/\n")
    group(host / "cgroup", {"memory.max": f"{10 * MIB}", "memory.current": f"{12 * MIB}", "memory.stat": ""})
    assert memory.left_bytes() == 0


def test_where_nothing_says_it_there_is_none(host):
    (host / "meminfo").unlink()
    (host / "groups").unlink()
    assert memory.left_bytes() == 0
    assert not memory.has_room(1)
