"""`MultiWorkerMirroredStrategy`: one worker a host, described to TensorFlow by TF_CONFIG."""

from __future__ import annotations

import json

from keepstep.core.records import Placement


def tf_config(ranks: tuple[Placement, ...], rank: int) -> str:
    """TF_CONFIG for `rank`: all workers in rank order, no chief, as AWS's toolkit writes it (JSON, keys sorted)."""
    workers = [f"{placement.address}:{placement.port}" for placement in ranks]
    config = {"cluster": {"worker": workers}, "environment": "cloud", "task": {"index": rank, "type": "worker"}}
    return json.dumps(config, sort_keys=True)
