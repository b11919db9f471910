"""What is read of a host: from files as kernels wrote them, with either version of control groups and with none."""

from __future__ import annotations

import os
import threading

import pytest

from keepstep.adapters.host import Disks, HostReader
from keepstep.adapters.host.files import numbers_of
from keepstep.adapters.host.groups import find_group
from keepstep.core.host_sample import Descriptors, Disk, Fabric, HostSample, Interface
from tests.support import host_files as files

NO_DISKS = Disks(())
NAMED_V2 = "sys/fs/cgroup/system.slice/docker-4ce3.scope"


def clocks(at: float = 50.0, unix_s: float = 1000.0):
    return (lambda: at), (lambda: unix_s)


def read(root, **more) -> HostSample:
    given = {"agent": files.AGENT, "eldest": files.INIT, "clocks": clocks(), **more}
    return HostReader(NO_DISKS, root=root, **given).read()


def test_where_nothing_is_told_nothing_is_known(tmp_path):
    assert read(tmp_path) == HostSample(50.0, 1000.0)


@pytest.mark.parametrize(
    "machine",
    [
        (files.NAMESPACE_V2, files.within("sys/fs/cgroup", files.GROUP_V2)),
        (files.HOST_V2, files.within(NAMED_V2, files.GROUP_V2)),
        # the name is another machine's: the container's own group is what is mounted
        ({**files.HOST_V2, "proc/7/mountinfo": ""}, files.within("sys/fs/cgroup", files.GROUP_V2)),
    ],
)
def test_version_2_tells_of_the_containers_own_group(tmp_path, machine):
    sample = read(files.lay_out(tmp_path, files.MACHINE, files.PRESSURE, *machine))
    assert (sample.group_cpu_s, sample.throttled_s) == (90.0, 30.0)
    assert (sample.memory_used_bytes, sample.memory_limit_bytes) == (2_000_000_000, 4_000_000_000)
    assert sample.oom_kills == 2
    assert (sample.cpu_waited_s, sample.memory_waited_s, sample.io_waited_s) == (7.0, 2.5, 4.5)


def test_version_1_in_a_container(tmp_path):
    groups = (
        files.within("sys/fs/cgroup/cpu,cpuacct", {**files.CPU_V1, **files.CPUACCT_V1}),
        files.within("sys/fs/cgroup/memory", files.MEMORY_V1),
    )
    sample = read(files.lay_out(tmp_path, files.MACHINE, files.PRESSURE, files.CONTAINER_V1, *groups))
    assert (sample.group_cpu_s, sample.throttled_s) == (90.0, 30.0)
    assert (sample.memory_used_bytes, sample.memory_limit_bytes) == (2_000_000_000, 4_000_000_000)
    assert sample.oom_kills == 2
    assert (sample.cpu_waited_s, sample.memory_waited_s, sample.io_waited_s) == (21.0, 1.0, 8.5)


def test_version_1_with_a_mount_for_each_controller(tmp_path):
    """What `cpuacct` counts is another group's: the job's own processes are what there is."""
    groups = (
        files.within("sys/fs/cgroup/cpu/jobs/one", files.CPU_V1),
        files.within("sys/fs/cgroup/cpuacct", files.CPUACCT_V1),
        files.within("sys/fs/cgroup/memory/jobs/one", {**files.MEMORY_V1, "memory.limit_in_bytes": f"{2**63 - 4096}"}),
        files.within("sys/fs/cgroup/memory/jobs", files.MEMORY_V1),
        files.within("sys/fs/cgroup/memory", {**files.MEMORY_V1, "memory.limit_in_bytes": f"{2**63 - 4096}"}),
    )
    sample = read(files.lay_out(tmp_path, files.MACHINE, files.MACHINE_V1, *groups))
    assert (sample.group_cpu_s, sample.throttled_s) == (None, 30.0)
    assert sample.own_cpu_s == 70.0
    assert sample.memory_limit_bytes == 4_000_000_000  # of the group above
    assert sample.cpu_waited_s is sample.memory_waited_s is sample.io_waited_s is None


def test_quotas_of_the_groups_above_count(tmp_path):
    above = files.within("sys/fs/cgroup/system.slice", {"cpu.stat": "usage_usec 1\nthrottled_usec 2000000\n"})
    files.lay_out(tmp_path, files.HOST_V2, files.within(NAMED_V2, files.GROUP_V2), above)
    assert read(tmp_path).throttled_s == 32.0


def test_a_group_without_limits_has_none(tmp_path):
    group = {"cpu.stat": "usage_usec 90000000\n", "memory.current": "5000\n", "memory.max": "max\n"}
    sample = read(files.lay_out(tmp_path, files.MACHINE, files.NAMESPACE_V2, files.within("sys/fs/cgroup", group)))
    assert (sample.throttled_s, sample.memory_used_bytes, sample.memory_limit_bytes) == (None, 5000, None)
    assert sample.oom_kills == 5  # the machine's


@pytest.mark.parametrize(
    ("cgroup", "outer", "folder"),
    [
        ("0::/a/b", "/a", "b"),
        ("0::/a/b", "/", "a/b"),
        ("0::/../../elsewhere", "/", ""),
        ("0::/ab", "/a", ""),
    ],
)
def test_what_is_left_of_a_groups_name_below_what_is_mounted(tmp_path, cgroup, outer, folder):
    at = tmp_path / "sys/fs/cgroup"
    (at / "a" / "b").mkdir(parents=True)
    (at / "b").mkdir()
    mount = f"9 8 0:28 {outer} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    files.lay_out(tmp_path, {"proc/7/cgroup": cgroup + "\n", "proc/7/mountinfo": mount})
    group = find_group("cpu", tmp_path, "7")
    assert group is not None and group.folders[0] == at / folder and group.folders[-1] == at


def test_processors_that_the_job_may_use(tmp_path):
    sample = read(files.lay_out(tmp_path, files.MACHINE))
    assert (sample.processors, sample.load) == (2, 3.25)
    assert (sample.cpu_s, sample.cpu_idle_s, sample.cpu_stolen_s) == (409.0, 304.5, 6.0)
    assert sample.own_cpu_s == 70.0  # init, the agent and the worker, and what they have waited for


def test_memory_and_descriptors(tmp_path):
    sample = read(files.lay_out(tmp_path, files.MACHINE))
    assert (sample.memory_available_bytes, sample.memory_total_bytes) == (8_000_000 << 10, 16_000_000 << 10)
    worker = Descriptors("worker", 7, 8)
    assert sample.descriptors == (Descriptors("agent", 5, 1024), worker, Descriptors("host", 1024, 2**63 - 1))


def test_network(tmp_path):
    files.lay_out(tmp_path, files.MACHINE, files.DEVICES)
    files.drive(tmp_path, "rdmap0s6", "efa")
    files.drive(tmp_path, "mlx5_0", "mlx5_core")
    sample = read(tmp_path)
    assert sample.interfaces == (Interface("eth0", 11000, 4, 12),)
    assert (sample.tcp_sent, sample.tcp_resent) == (7771, 160)
    counters = (("rx_drops", 12), ("tx_pkts", 400))
    assert sample.fabrics == (
        Fabric("infiniband mlx5_0/2", (("link_downed", 1),)),
        Fabric("efa rdmap0s6", counters),
    )


def test_heat_and_file_systems(tmp_path):
    """Processors 0 and 1 are threads of one core, and all three are of one package."""
    sample = read(files.lay_out(tmp_path, files.DEVICES))
    assert sample.thermal_slowdowns == 4 + 4 + 9
    assert (sample.temperature_c, sample.temperature_max_c) == (82.0, 90.0)
    assert sample.disk_errors == (("nvme0n1p1", 3),)
    files.forget(tmp_path, "sys/class/thermal/thermal_zone1/trip_point_1_type")
    files.forget(tmp_path, "sys/class/thermal/thermal_zone0/trip_point_0_type")
    sample = read(tmp_path)
    assert (sample.temperature_c, sample.temperature_max_c) == (82.0, None)


@pytest.mark.parametrize("name", sorted({**files.MACHINE, **files.PRESSURE, **files.DEVICES}))
def test_a_file_of_rubbish_is_as_none(tmp_path, name):
    groups = files.within("sys/fs/cgroup", files.GROUP_V2)
    files.lay_out(tmp_path, files.MACHINE, files.PRESSURE, files.DEVICES, files.NAMESPACE_V2, groups)
    whole = read(tmp_path)
    (tmp_path / name).write_text("\x00 cpu: Tcp: some ) -\ncpu0 x\n")
    rubbish = read(tmp_path)
    assert rubbish.at == whole.at
    files.forget(tmp_path, name)
    read(tmp_path)


def test_who_was_stopped_between_two_clocks_does_not_believe_in_a_step(tmp_path):
    readings = iter((10.0, 45.0, 50.0, 50.01))
    sample = read(tmp_path, clocks=((lambda: next(readings)), (lambda: 1000.0)))
    assert (sample.at, sample.unix_s) == (50.0, 1000.0)
    far = iter(range(0, 1000, 10))
    assert read(tmp_path, clocks=((lambda: float(next(far))), (lambda: 1000.0))).unix_s is None


def test_this_machine_is_read():
    sample = HostReader(Disks(("/", "/not/there")), eldest=os.getpid()).read()
    assert sample.processors and sample.cpu_s and sample.memory_total_bytes and sample.own_cpu_s
    assert [disk.folder for disk in sample.disks] == ["/"]
    assert {each.holder for each in sample.descriptors} >= {"agent", "host"}


def test_lists_of_processors():
    assert numbers_of(" 0-2,8\n") == {0, 1, 2, 8}
    assert numbers_of("") == numbers_of("x-y") == frozenset()


# --- disks -----------------------------------------------------------------------------------------------------------


def statvfs(free: int, *, files_free: int = 9, flags: int = 0) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 1000, free, free, 100, files_free, files_free, flags, 255))


def test_folders_on_one_file_system_are_one_disk():
    told = {"/tmp": (1, statvfs(10)), "/out": (1, statvfs(10)), "/shm": (2, statvfs(3, flags=os.ST_RDONLY))}
    disks = Disks(tuple(told), lambda folder: told[folder])
    tmp = Disk("/tmp", 4_096_000, 40_960, 100, 9)
    assert disks.look(0.0) == (tmp, Disk("/shm", 4_096_000, 12_288, 100, 9, read_only=True))


def test_a_disk_that_does_not_answer_holds_nobody_up():
    gate, answered, calls = threading.Event(), threading.Event(), []

    def ask(folder: str) -> tuple[int, os.statvfs_result]:
        calls.append(folder)
        (gate if folder == "/gone" else answered).wait(30)
        return hash(folder), statvfs(10)

    answered.set()
    disks = Disks(("/gone", "/tmp"), ask, patience_s=0.1)
    (gone, tmp), (still_gone, _) = disks.look(100.0), disks.look(107.0)
    assert gone.folder == "/gone" and 0 < gone.silent_s < 1 and still_gone.silent_s == 7.0
    assert (tmp.folder, tmp.silent_s) == ("/tmp", 0.0)
    assert calls.count("/gone") == 1
    gate.set()
    assert disks.look(110.0)[0] == Disk("/gone", 4_096_000, 40_960, 100, 9)


def test_a_folder_that_comes_later_is_seen_then(tmp_path):
    later = tmp_path / "later"
    disks = Disks((str(later),))
    assert disks.look(0.0) == ()
    later.mkdir()
    assert [disk.folder for disk in disks.look(5.0)] == [str(later)]
