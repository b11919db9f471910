"""`MultiWorkerMirroredStrategy`: one worker a host, described to TensorFlow by TF_CONFIG."""

from __future__ import annotations

import json


def tf_config(addresses: tuple[str, ...], rank: int) -> str:
    """TF_CONFIG for `rank`: all workers in rank order, no chief, as AWS's toolkit writes it (JSON, keys sorted)."""
    config = {"cluster": {"worker": list(addresses)}, "environment": "cloud", "task": {"index": rank, "type": "worker"}}
    return json.dumps(config, sort_keys=True)
