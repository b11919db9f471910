"""Hardware: what the GPUs of this host say about themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one poll; None where the device or its driver does not tell."""

    uuid: str
    index: int
    lost: bool = False
    """The driver has lost the device: nothing else is known then."""
    temperature_c: float | None = None
    power_w: float | None = None
    memory_used_bytes: int | None = None
    ecc_corrected: int | None = None
    """Errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    remap_failed: bool | None = None
    """A row that should have been remapped could not be: the device wants replacing."""
    throttle: tuple[str, ...] = ()
    """Why the clocks are held down, by name; empty at full speed and when idle."""
    xids: tuple[int, ...] = ()
    """Xid errors since the poll before, oldest first."""
