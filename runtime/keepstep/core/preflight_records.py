"""What hosts find out about each other before they train, as it stands in the coordinator."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

from keepstep.core.values import frozen


class Check(StrEnum):
    """What is looked at."""

    GPU = "gpu"
    """How many there are, and whether the driver has lost one."""
    MATMUL = "matmul"
    """Multiplications of matrices on the slowest of the host's GPUs, a second."""
    SPEED = "speed"
    """Bytes that its processors hash, a second: what a quota, a clock that is held down or a neighbour leaves."""
    MEMORY = "memory"
    """Bytes that one processor copies, a second."""
    DISK = "disk"
    STORE = "store"
    CLOCK = "clock"
    LINK = "link"
    """Whether another host is reached, and how fast one stream is, the slower way."""
    ANSWER = "answer"
    """Whether the host has said anything at all."""


class Guest(NamedTuple):
    """One host of a preflight, and where it is reached."""

    host: str
    node_id: str
    address: str = ""
    peer_port: int = 0


@frozen
class Rate:
    """What was measured, more is better: a count, or what is done in a second."""

    check: Check
    value: float


@frozen
class Complaint:
    """What a host finds wrong with itself, in words."""

    check: Check
    text: str


@frozen
class Link:
    """One host's line to another: bytes a second each way, and how far the other's clock is ahead, in seconds.

    Where `error` says why nothing was measured, the rest is 0.
    """

    peer: str
    sent: float = 0.0
    received: float = 0.0
    ahead_s: float = 0.0
    error: str = ""


@frozen
class PreflightPlan:
    """Who is to be checked now, as the leader says; `others` are there to be measured with, and train already."""

    number: int
    guests: tuple[Guest, ...]
    others: tuple[Guest, ...] = ()
    key: str = "preflight"
    kind: Literal["preflight"] = "preflight"


@frozen
class PreflightRecord:
    """What one host has found in preflight `number`, in so many `seconds`.

    Attributes:
        machine: the platform's name for the kind of machine; only what is equal can be compared.
        quiet: nothing of the job ran meanwhile: all processors but one were measured, else a single one.
    """

    host: str
    node_id: str
    number: int
    machine: str = ""
    quiet: bool = False
    rates: tuple[Rate, ...] = ()
    complaints: tuple[Complaint, ...] = ()
    links: tuple[Link, ...] = ()
    seconds: float = 0.0
    kind: Literal["check"] = "check"

    @property
    def key(self) -> str:
        return f"checks/{self.host}"
