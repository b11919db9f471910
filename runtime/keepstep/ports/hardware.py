"""Hardware: what this host and its GPUs say about themselves. It is told to the core as it comes."""

from __future__ import annotations

from keepstep.core.gpu_events import GpuSample as GpuSample
from keepstep.core.host_sample import HostSample as HostSample
