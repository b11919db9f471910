"""What goes wrong with the hosts of a large job, drawn from a seed: who becomes slow, whose GPU fails, and when."""

from __future__ import annotations

from enum import StrEnum
from random import Random

from keepstep.core.splits import Part
from keepstep.core.values import frozen


class Kind(StrEnum):
    """What can be wrong with a host."""

    STRAGGLER = "straggler"
    """Slow from now on, of computing or of data."""
    THROTTLED = "throttled"
    """The GPU's clocks are held down from now on: told by the driver, and slow of computing."""
    FATAL_XID = "fatal xid"
    ECC = "uncorrectable ecc"
    HARMLESS_XID = "harmless xid"
    NEIGHBOUR = "neighbour"
    """Slow for some seconds."""
    SPELL = "spell"
    """Slow for a minute, once: a straggler while it lasts, and none that is worth a replacement."""
    STALL = "stall"
    """One step takes up to a minute, once."""


CHRONIC = (Kind.STRAGGLER, Kind.THROTTLED)
FAULTS = (Kind.FATAL_XID, Kind.ECC)
OF_GPUS = (Kind.THROTTLED, Kind.FATAL_XID, Kind.ECC, Kind.HARMLESS_XID)

RATES = {
    Kind.STRAGGLER: 2.0,
    Kind.THROTTLED: 0.5,
    Kind.FATAL_XID: 0.3,
    Kind.ECC: 0.15,
    Kind.HARMLESS_XID: 2.0,
    Kind.NEIGHBOUR: 50.0,
    Kind.SPELL: 0.5,
    Kind.STALL: 0.5,
}
"""So many in 1,000 host-hours. Far more than a healthy fleet has, so that some hours show enough of each: a published
54 days of training on 2,048 hosts had 0.09 faults of GPUs and their memory in 1,000 host-hours (Llama 3, 2024).
"""

FATAL_XIDS = (48, 74, 79, 95)
HARMLESS_XIDS = (13, 31, 43, 45)
"""A script's own errors, and what ends with its process."""

DATA_S, COMPUTE_S, REST_S, SYNC_S = 0.012, 0.36, 0.008, 0.04
"""A healthy step of 0.42 s: what a rank does itself, and what all of them exchange."""
WORK_S = DATA_S + COMPUTE_S + REST_S
SCATTER = 0.03
"""Standard deviation of the logarithm of a step's computing, from step to step; of data and rest it is SCATTER_REST."""
SCATTER_REST = 0.2
SCATTER_HOSTS = 0.01
"""The same from host to host, for good."""


@frozen
class Ailment:
    """Something that is wrong with `host` from `at_s` on, for `lasts_s`; seconds since the simulation began.

    Attributes:
        more_s: seconds by which `part` of each step is longer.
        xid: what the driver says.
        ends_worker: whether its worker dies of it, too, before or after the GPU is read.
    """

    kind: Kind
    host: str
    at_s: float
    lasts_s: float = float("inf")
    part: Part = Part.COMPUTE
    more_s: float = 0.0
    xid: int = 0
    ends_worker: bool = False

    @property
    def ratio(self) -> float:
        """So many times as long as a healthy host it works on a step."""
        return 1.0 + self.more_s / WORK_S


def plan(seed: int, hosts: tuple[str, ...], hours: float, rates: dict[Kind, float] | None = None) -> list[Ailment]:
    """All that goes wrong, by time; what lasts once to a host, and nothing to the first one, which leads."""
    random = Random(f"health/{seed}")
    free = list(hosts[1:])
    random.shuffle(free)
    found: list[Ailment] = []
    for kind, rate in (RATES | (rates or {})).items():
        at_h = 0.0
        while rate > 0:
            at_h += random.expovariate(rate * len(hosts) / 1000.0)
            brief = kind in (Kind.NEIGHBOUR, Kind.SPELL, Kind.STALL)
            if at_h >= hours or not (free or brief):
                break
            host = random.choice(hosts[1:]) if brief else free.pop()
            found.append(_drawn(random, kind, host, at_h * 3600.0))
    return sorted(found, key=lambda each: each.at_s)


def _drawn(random: Random, kind: Kind, host: str, at_s: float) -> Ailment:
    factor = random.uniform(1.15, 3.0)
    match kind:
        case Kind.STRAGGLER if random.random() < 0.3:
            return Ailment(kind, host, at_s, part=Part.DATA, more_s=(factor - 1.0) * WORK_S)
        case Kind.STRAGGLER | Kind.THROTTLED:
            return Ailment(kind, host, at_s, more_s=(factor - 1.0) * COMPUTE_S)
        case Kind.NEIGHBOUR | Kind.SPELL:
            lasts_s = random.uniform(2.0, 10.0) if kind is Kind.NEIGHBOUR else 60.0
            return Ailment(kind, host, at_s, lasts_s, more_s=(random.uniform(1.3, 2.5) - 1.0) * COMPUTE_S)
        case Kind.STALL:
            return Ailment(kind, host, at_s, 0.0, random.choice((Part.DATA, Part.REST)), random.uniform(5.0, 60.0))
        case Kind.FATAL_XID:
            return Ailment(kind, host, at_s, xid=random.choice(FATAL_XIDS), ends_worker=random.random() < 0.5)
        case Kind.ECC:
            return Ailment(kind, host, at_s, ends_worker=random.random() < 0.5)
        case Kind.HARMLESS_XID:
            return Ailment(kind, host, at_s, 0.0, xid=random.choice(HARMLESS_XIDS))
