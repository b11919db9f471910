"""What sensors report of standbys, and of what a worker teaches them."""

from __future__ import annotations

from typing import Literal

from keepstep.core.values import frozen


@frozen
class WorkerImported:
    """A large module has been imported; with what settings is not the core's business."""

    worker_id: str
    module: str
    kind: Literal["worker_imported"] = "worker_imported"


@frozen
class StandbyReady:
    """It has its imports behind it."""

    standby_id: str
    kind: Literal["standby_ready"] = "standby_ready"


@frozen
class StandbyGone:
    """A standby has ended, was of no use to the script, or could not be had. `retry_s`: when to try again."""

    standby_id: str
    detail: str
    retry_s: float = 0.0
    kind: Literal["standby_gone"] = "standby_gone"
