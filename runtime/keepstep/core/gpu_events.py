"""What sensors report of a host's GPUs, and of what the store says is cordoned."""

from __future__ import annotations

from typing import Literal

from keepstep.core.values import frozen


@frozen
class GpuSample:
    """One GPU at one poll; None where the device or its driver does not tell.

    Attributes:
        uuid: the driver's name of the device; `index-N` for one that was lost before it could be asked.
        lost: the driver has lost the device: nothing else is known then.
        ecc_corrected: errors since the driver was loaded; so are `ecc_uncorrected`.
        remap_failed: a row that should have been remapped could not be: the device wants replacing.
        throttle: why the clocks are held down, by name; empty at full speed and when idle.
        xids: Xid errors since the poll before, oldest first.
        repair_pending: a memory row is to be remapped, or a page retired, at the next reset.
        retired_pages: pages retired for good, whatever for.
        clock_mhz: of the streaming multiprocessors; `clock_max_mhz` what they can have.
        links_down: NVLinks that the device has and that are not active.
        link_errors: errors of all NVLinks: replays, recoveries, CRC.
        pcie_replays: since the driver was loaded.
        recovery: what the driver wants done to make the device usable again, by name; empty for nothing.
        foreign_bytes: device memory held by processes that are not of this job.
    """

    uuid: str
    index: int
    lost: bool = False
    temperature_c: float | None = None
    power_w: float | None = None
    memory_used_bytes: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_failed: bool | None = None
    throttle: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    repair_pending: bool | None = None
    retired_pages: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    links_down: int | None = None
    link_errors: int | None = None
    pcie_replays: int | None = None
    recovery: str = ""
    foreign_bytes: int | None = None


@frozen
class GpusSampled:
    """Those GPUs of this host that have something new to tell; with `silent` none has: the driver does not answer."""

    gpus: tuple[GpuSample, ...]
    silent: bool = False
    kind: Literal["gpus_sampled"] = "gpus_sampled"


@frozen
class KeptCordon:
    """An entry of the store's list of what is to take no part in the job, whatever name its host has by then.

    Attributes:
        what: a GPU's UUID, or the boot id of a host without one.
        host: the name that the host had.
        by: who wanted it: `health`, or an operator.
        why: the evidence, or what the operator said.
        at: unix seconds.
    """

    what: str
    host: str
    by: str
    why: str
    at: float


@frozen
class CordonsRead:
    """The store's list as an agent finds it when it starts; not told where it is empty."""

    cordons: tuple[KeptCordon, ...]
    kind: Literal["cordons_read"] = "cordons_read"


@frozen
class CordonsKept:
    """The store's list says what it was to say."""

    operation: str
    kind: Literal["cordons_kept"] = "cordons_kept"
