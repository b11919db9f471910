"""tf.data's service: one dispatcher, and a worker on each host that feeds the others.

The dispatcher keeps a journal on its host's disk: started again, it knows the jobs and their workers. A worker started
again at its address gets what is left to do. What that means for samples, TensorFlow says: with dynamic sharding each
is visited at most once, without sharding every worker gives all of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DISPATCHER = "dispatcher"
_HEARTBEAT_MS, _WORKER_LOST_MS = 1_000, 10_000
_WAIT_FOR_DISPATCHER_MS = 600_000


def data_service(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the job's tf.data service, as `distribute(service=...)` takes it.

    None where no host runs it, as outside keepstep: then the data are to be read here.
    """
    return environ.get("KEEPSTEP_DATA_SERVICE") or None


def run(role: str, generation: int, environ: Mapping[str, str] = os.environ) -> None:
    """Be a dispatcher or a worker of it, until somebody ends it."""
    import tensorflow as tf

    service = tf.data.experimental.service
    address = environ["KEEPSTEP_LISTEN"]
    protocol, _, dispatcher = environ["KEEPSTEP_DATA_SERVICE"].partition("://")
    port = int(address.rpartition(":")[2])
    server: Any
    if role == DISPATCHER:
        folder = _journal(Path(environ["KEEPSTEP_WORK_DIR"]), f"{environ['KEEPSTEP_RUN']}-{generation}")
        server = service.DispatchServer(
            service.DispatcherConfig(
                port=port, protocol=protocol, work_dir=str(folder), fault_tolerant_mode=True,
                worker_timeout_ms=_WORKER_LOST_MS,
            )
        )  # fmt: skip
    else:
        server = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=dispatcher, worker_address=address, port=port, protocol=protocol,
                heartbeat_interval_ms=_HEARTBEAT_MS, dispatcher_timeout_ms=_WAIT_FOR_DISPATCHER_MS,
            )
        )  # fmt: skip
    server.join()


def _journal(place: Path, world: str) -> Path:
    """The folder of a world's dispatcher; what former worlds had asked for is of no use to it."""
    folder = place / f"data-service-{world}"
    for former in place.glob("data-service-*"):
        if former != folder:
            shutil.rmtree(former, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
