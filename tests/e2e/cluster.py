"""A TensorFlow cluster on this machine: who listens where."""

from __future__ import annotations

import json

from tests.support.ports import free_port


def cluster(hosts: int) -> dict[str, list[str]]:
    """An address for each rank, on ports that nobody else gets."""
    return {"worker": [f"127.0.0.1:{free_port()}" for _ in range(hosts)]}


def tf_configs(hosts: int) -> list[str]:
    """TF_CONFIG of each rank."""
    described = cluster(hosts)
    return [json.dumps({"cluster": described, "task": {"type": "worker", "index": rank}}) for rank in range(hosts)]
