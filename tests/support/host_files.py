"""A /proc and /sys as machines show them, as files below a folder: what the kernel wrote, by controller version."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

AGENT, INIT, WORKER = 7, 1, 21
TICKS = 100
"""Of a second, on every Linux that there is."""

NAMESPACE_V2 = {
    "proc/7/cgroup": "0::/\n",
    "proc/7/mountinfo": (
        "2187 2170 0:111 / / rw,relatime master:539 - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/ABC\n"
        "2190 2187 0:114 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro\n"
        "2191 2190 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
    ),
}
"""A container of Docker's on cgroup v2: a namespace of its own."""

HOST_V2 = {
    "proc/7/cgroup": "0::/system.slice/docker-4ce3.scope\n",
    "proc/7/mountinfo": "2191 2190 0:28 / /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
}
"""The same without a namespace: all groups of the machine are in sight."""

CONTAINER_V1 = {
    "proc/7/cgroup": (
        "11:memory:/docker/4ce3\n10:cpu,cpuacct:/docker/4ce3\n4:devices:/docker/4ce3\n1:name=systemd:/docker/4ce3\n0::/\n"
    ),
    "proc/7/mountinfo": (
        "620 619 0:30 /docker/4ce3 /sys/fs/cgroup/systemd ro,nosuid master:11 - cgroup cgroup rw,xattr,name=systemd\n"
        "622 619 0:33 /docker/4ce3 /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:16 - cgroup cgroup rw,cpu,cpuacct\n"
        "625 619 0:36 /docker/4ce3 /sys/fs/cgroup/memory ro,nosuid master:19 - cgroup cgroup rw,memory\n"
    ),
}
"""A container of Docker's on cgroup v1: its groups have the names that they have outside, mounted at the root."""

MACHINE_V1 = {
    "proc/7/cgroup": "9:name=systemd:/\n4:memory:/jobs/one\n2:cpuacct:/\n1:cpu:/jobs/one\n0::/\n",
    "proc/7/mountinfo": (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
        "33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "38 31 0:35 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    ),
}
"""A machine on which each controller has a mount of its own, and version 2 one with none."""

GROUP_V2 = {
    "cpu.stat": (
        "usage_usec 90000000\nuser_usec 80000000\nsystem_usec 10000000\nnr_periods 500\nnr_throttled 400\n"
        "throttled_usec 30000000\nnr_bursts 0\nburst_usec 0\n"
    ),
    "cpu.max": "200000 100000\n",
    "cpu.pressure": "some avg10=4.11 avg60=3.00 avg300=1.00 total=7000000\nfull avg10=0.00 avg60=0.00 total=12\n",
    "memory.current": "3000000000\n",
    "memory.max": "4000000000\n",
    "memory.stat": "anon 1500000000\nfile 1200000000\ninactive_file 1000000000\nactive_file 200000000\n",
    "memory.events": "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n",
    "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=2000000\n",
    "io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=4500000\nfull avg10=0.00 total=4000000\n",
}

CPU_V1 = {"cpu.stat": "nr_periods 500\nnr_throttled 400\nthrottled_time 30000000000\nnr_bursts 0\nburst_time 0\n"}
CPUACCT_V1 = {"cpuacct.usage": "90000000000\n"}
MEMORY_V1 = {
    "memory.usage_in_bytes": "3000000000\n",
    "memory.limit_in_bytes": "4000000000\n",
    "memory.stat": "cache 1200000000\ninactive_file 7\ntotal_cache 1200000000\ntotal_inactive_file 1000000000\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}

MACHINE = {
    "proc/stat": (
        "cpu  9000 100 3000 40000 500 0 300 1100 7 0\n"
        "cpu0 4000 100 2000 20000 400 0 200 300 7 0\n"
        "cpu1 3000 0 500 10000 50 0 50 300 0 0\n"
        "cpu2 2000 0 500 10000 50 0 50 500 0 0\n"
        "intr 77 0 0\nctxt 1234\nbtime 1700000000\nprocesses 99\nprocs_running 3\nprocs_blocked 0\n"
    ),
    "proc/loadavg": "3.25 1.10 0.50 4/310 4242\n",
    "proc/meminfo": "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n",
    "proc/vmstat": "nr_free_pages 1000\noom_kill 5\n",
    "proc/sys/fs/file-nr": "1024\t0\t9223372036854775807\n",
    "proc/net/dev": (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo: 900 90 1 1 0 0 0 0 900 90 1 1 0 0 0 0\n"
        "  eth0: 1000 5000 3 12 0 0 0 0 2000 6000 1 0 0 0 0 0\n"
    ),
    "proc/net/snmp": (
        "Ip: Forwarding DefaultTTL\nIp: 1 64\n"
        "Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens InSegs OutSegs RetransSegs InErrs\n"
        "Tcp: 1 200 120000 -1 39 14368 7771 160 0\n"
    ),
    "proc/7/status": "Name:\tpython3\nCpus_allowed:\t7\nCpus_allowed_list:\t0-1\n",
    "proc/1/stat": "1 (keepstep: init) S 0 1 1 0 -1 4194560 1 2 3 4 100 50 30 20 20 0 1 0 5 0 0\n",
    "proc/7/stat": "7 (python3) S 1 1 1 0 -1 4194560 1 2 3 4 200 100 0 0 20 0 1 0 5 0 0\n",
    "proc/21/stat": "21 (a (bad) name) R 7 1 1 0 -1 4194560 1 2 3 4 6000 500 0 0 20 0 1 0 5 0 0\n",
    "proc/50/stat": "50 (somebody else) R 2 1 1 0 -1 4194560 1 2 3 4 90000 500 0 0 20 0 1 0 5 0 0\n",
    "proc/7/limits": "Limit             Soft Limit Hard Limit Units\nMax open files    1024       4096       files\n",
    "proc/21/limits": "Limit             Soft Limit Hard Limit Units\nMax open files    8          4096       files\n",
    **{f"proc/7/fd/{number}": "" for number in range(5)},
    **{f"proc/21/fd/{number}": "" for number in range(7)},
}
"""A machine of three processors of which the job may use two; its time is in hundredths of seconds."""

PRESSURE = {
    "proc/pressure/cpu": "some avg10=1.00 avg60=0.00 avg300=0.00 total=21000000\nfull avg10=0.00 total=0\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 total=0\n",
    "proc/pressure/io": "some avg10=0.39 avg60=0.34 avg300=0.85 total=8500000\nfull avg10=0.00 total=8034251\n",
}

DEVICES = {
    **{f"sys/devices/system/cpu/cpu{n}/topology/physical_package_id": "0\n" for n in range(3)},
    **{f"sys/devices/system/cpu/cpu{n}/topology/core_id": f"{n // 2}\n" for n in range(3)},
    **{f"sys/devices/system/cpu/cpu{n}/thermal_throttle/core_throttle_count": "4\n" for n in range(3)},
    **{f"sys/devices/system/cpu/cpu{n}/thermal_throttle/package_throttle_count": "9\n" for n in range(3)},
    "sys/class/thermal/thermal_zone0/temp": "61000\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "critical\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "105000\n",
    "sys/class/thermal/thermal_zone1/temp": "82000\n",
    "sys/class/thermal/thermal_zone1/trip_point_0_type": "passive\n",
    "sys/class/thermal/thermal_zone1/trip_point_0_temp": "70000\n",
    "sys/class/thermal/thermal_zone1/trip_point_1_type": "hot\n",
    "sys/class/thermal/thermal_zone1/trip_point_1_temp": "90000\n",
    "sys/class/thermal/cooling_device0/type": "Processor\n",
    "sys/fs/ext4/features/metadata_csum_seed": "supported\n",
    "sys/fs/ext4/nvme0n1p1/errors_count": "3\n",
    "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/rx_drops": "12\n",
    "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/tx_pkts": "400\n",
    "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/lifespan": "12\n",
    "sys/class/infiniband/mlx5_0/ports/2/counters/link_downed": "1\n",
    "sys/class/infiniband/mlx5_0/ports/2/counters/port_rcv_data": "1000\n",
}


def within(folder: str, files: Mapping[str, str]) -> dict[str, str]:
    """The same files, in a folder."""
    return {f"{folder}/{name}": text for name, text in files.items()}


def lay_out(root: Path, *kinds: Mapping[str, str]) -> Path:
    """Write files below a folder, the later ones over the earlier."""
    for name, text in (item for files in kinds for item in files.items()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def drive(root: Path, device: str, driver: str) -> None:
    """Say by a link, as the kernel does, whose device it is."""
    folder = root / "sys" / "class" / "infiniband" / device / "device"
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    (folder / "driver").symlink_to(root / "drivers" / driver)


def forget(root: Path, name: str) -> None:
    """Take a file or a folder away."""
    path = root / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
