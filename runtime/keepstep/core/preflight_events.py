"""A host is to be checked, and has been."""

from __future__ import annotations

from typing import Literal

from keepstep.core.preflight_records import Complaint, Guest, Link, Rate
from keepstep.core.values import frozen


@frozen
class CheckHost:
    """Look at this host and at its lines to `peers`, in their order; answer within `limit_s`, with what there is.

    Where it is not `quiet` the job runs beside: its GPUs, and its processors but one, are left to it.
    """

    operation: str
    peers: tuple[Guest, ...]
    limit_s: float
    quiet: bool


@frozen
class HostChecked:
    """What was found; see `PreflightRecord`."""

    operation: str
    machine: str
    rates: tuple[Rate, ...] = ()
    complaints: tuple[Complaint, ...] = ()
    links: tuple[Link, ...] = ()
    seconds: float = 0.0
    kind: Literal["host_checked"] = "host_checked"
