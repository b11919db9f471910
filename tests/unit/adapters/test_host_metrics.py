"""What a scrape shows of a host."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from keepstep.adapters.host_metrics import HostMetrics
from keepstep.core.host_sample import Descriptors, Disk, Fabric, HostSample, Interface, StrainKind


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=False)


def lines(registry: CollectorRegistry) -> set[str]:
    return {line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")}


def test_before_the_first_sample_only_the_kinds_of_strains_are_there(registry):
    HostMetrics(registry)
    assert lines(registry) == {f'keepstep_host_strained{{kind="{kind.value}"}} 0.0' for kind in StrainKind}


def test_all_that_a_host_tells_is_shown(registry):
    sample = HostSample(
        at=50.0,
        unix_s=1050.5,
        cpu_s=400.0,
        cpu_idle_s=100.0,
        throttled_s=12.5,
        io_waited_s=3.0,
        load=2.5,
        memory_used_bytes=10,
        memory_limit_bytes=20,
        oom_kills=2,
        disks=(Disk("/tmp", 100, 50, 1000, 500, read_only=True), Disk("/fsx", silent_s=15.0)),
        disk_errors=(("vda", 7),),
        descriptors=(Descriptors("agent", 100, 1024),),
        thermal_slowdowns=4,
        temperature_c=61.0,
        interfaces=(Interface("eth0", 1000, 1, 5),),
        tcp_sent=1000,
        tcp_resent=10,
        fabrics=(Fabric("efa rdmap1", (("rx_drops", 12),)),),
    )
    HostMetrics(registry).host(sample, {StrainKind.CPU_QUOTA})
    shown = {line for line in lines(registry) if "strained" not in line}
    assert shown == {
        'keepstep_host_cpu_seconds_total{use="all"} 400.0',
        'keepstep_host_cpu_seconds_total{use="idle"} 100.0',
        "keepstep_host_cpu_throttled_seconds_total 12.5",
        'keepstep_host_waited_seconds_total{resource="io"} 3.0',
        "keepstep_host_load 2.5",
        "keepstep_host_memory_used_bytes 10.0",
        "keepstep_host_memory_limit_bytes 20.0",
        "keepstep_host_oom_kills_total 2.0",
        'keepstep_host_disk_free_bytes{folder="/tmp"} 50.0',
        'keepstep_host_disk_size_bytes{folder="/tmp"} 100.0',
        'keepstep_host_disk_files_free{folder="/tmp"} 500.0',
        'keepstep_host_disk_read_only{folder="/tmp"} 1.0',
        'keepstep_host_disk_silent_seconds{folder="/tmp"} 0.0',
        'keepstep_host_disk_silent_seconds{folder="/fsx"} 15.0',
        'keepstep_host_disk_errors_total{device="vda"} 7.0',
        "keepstep_host_clock_offset_seconds 1000.5",
        'keepstep_host_open_files{holder="agent"} 100.0',
        'keepstep_host_open_files_max{holder="agent"} 1024.0',
        "keepstep_host_thermal_slowdowns_total 4.0",
        "keepstep_host_temperature_celsius 61.0",
        'keepstep_host_interface_packets_total{interface="eth0"} 1000.0',
        'keepstep_host_interface_errors_total{interface="eth0"} 1.0',
        'keepstep_host_interface_drops_total{interface="eth0"} 5.0',
        'keepstep_host_tcp_segments_total{how="sent"} 1000.0',
        'keepstep_host_tcp_segments_total{how="resent"} 10.0',
        'keepstep_host_fabric_events_total{counter="rx_drops",port="efa rdmap1"} 12.0',
    }
    assert 'keepstep_host_strained{kind="cpu_quota"} 1.0' in lines(registry)
    assert 'keepstep_host_strained{kind="io_wait"} 0.0' in lines(registry)
