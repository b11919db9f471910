"""Network: interfaces, TCP, and the counters of EFA and InfiniBand devices.

Source: proc(5), RFC 4022, the kernel's
Documentation/ABI/stable/sysfs-class-infiniband, the EFA driver's and mlx5's counters.
"""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.adapters.host.files import entries_of, number_of, text_of, whole
from keepstep.core.host_sample import Fabric, Interface

FABRIC_COUNTERS = (
    # EFA
    "rx_drops", "retrans_pkts", "retrans_timeout_events", "unresponsive_remote_events", "impaired_remote_conn_events",
    "rdma_read_wr_err", "rdma_write_wr_err", "tx_pkts",
    # InfiniBand, and mlx5's own
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "out_of_buffer", "local_ack_timeout_err",
    "packet_seq_err", "rnr_nak_retry_err", "req_transport_retries_exceeded",
)  # fmt: skip
"""What should not happen, and how many packets were sent."""

_WORDS = {"efa": "efa", "": "fabric"}


def interfaces_of(proc: Path) -> tuple[Interface, ...]:
    """All network interfaces but the one to oneself."""
    found = []
    for line in text_of(proc / "net" / "dev").splitlines():
        name, colon, rest = line.partition(":")
        words = [whole(word) for word in rest.split()]
        numbers = [word for word in words if word is not None]
        if colon and len(numbers) == len(words) >= 12 and name.strip() != "lo":
            received, sent = numbers[:8], numbers[8:]
            found.append(Interface(name.strip(), received[1] + sent[1], received[2] + sent[2], received[3] + sent[3]))
    return tuple(sorted(found, key=lambda each: each.name))


def segments_of(proc: Path) -> tuple[int | None, int | None]:
    """TCP segments sent, and sent again: these are not among the former."""
    lines = [line.split()[1:] for line in text_of(proc / "net" / "snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        return None, None
    row = dict(zip(*lines, strict=False))
    return whole(row.get("OutSegs", "")), whole(row.get("RetransSegs", ""))


def fabrics_of(system: Path) -> tuple[Fabric, ...]:
    """Each port of each device of the kind that EFA is of."""
    found = []
    for device in entries_of(system / "class" / "infiniband"):
        driver = device / "device" / "driver"
        kind = os.path.basename(os.path.realpath(driver)) if os.path.islink(driver) else ""
        for port in entries_of(device / "ports"):
            name = f"{_WORDS.get(kind, 'infiniband')} {device.name}" + (f"/{port.name}" if port.name != "1" else "")
            found.append(Fabric(name, tuple(_counters_of(port))))
    return tuple(found)


def _counters_of(port: Path) -> list[tuple[str, int]]:
    folders = (port / "hw_counters", port / "counters")
    read = [(name, number_of(folder / name)) for folder in folders for name in FABRIC_COUNTERS]
    return [(name, count) for name, count in read if count is not None]
