"""What the hands of the agent promise: one Protocol per outside thing, with the values and errors that cross it.

What lives here: Protocols, frozen values, the errors a port may raise. What must never enter: an implementation, an
import of an adapter. Each port has one suite in `tests/conformance`, run on the fake and on the real thing. Start
reading at `coordination.py` and `store.py`.
"""

from __future__ import annotations

from keepstep.ports.coordination import (
    REQUEST_BYTES_MAX,
    Coordinator,
    CoordinatorRefused,
    CoordinatorUnavailable,
    KeyEvent,
    KeyValue,
    KeyWatch,
    LeaseGone,
    Span,
    WatchLost,
)
from keepstep.ports.hardware import (
    GpuSample,
    HostSample,
)
from keepstep.ports.peers import (
    Peer,
    PeerAway,
    PeerLacks,
    Sharing,
    Wanted,
)
from keepstep.ports.processes import (
    Keeper,
    KeptDescriptor,
)
from keepstep.ports.store import (
    ChecksumMismatch,
    Chunks,
    Conflict,
    NotFound,
    ObjectStat,
    ObjectStore,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from keepstep.ports.telemetry import (
    MetricsSink,
)
from keepstep.ports.trust import (
    TlsFiles,
)

__all__ = [
    "REQUEST_BYTES_MAX",
    "ChecksumMismatch",
    "Chunks",
    "Conflict",
    "Coordinator",
    "CoordinatorRefused",
    "CoordinatorUnavailable",
    "GpuSample",
    "HostSample",
    "Keeper",
    "KeptDescriptor",
    "KeyEvent",
    "KeyValue",
    "KeyWatch",
    "LeaseGone",
    "MetricsSink",
    "NotFound",
    "ObjectStat",
    "ObjectStore",
    "Peer",
    "PeerAway",
    "PeerLacks",
    "PreconditionFailed",
    "Sharing",
    "Span",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "TlsFiles",
    "Wanted",
    "WatchLost",
]
