"""A TensorFlow cluster on this machine: who listens where."""

from __future__ import annotations

import contextlib
import json
import random
import socket


def tf_configs(hosts: int) -> list[str]:
    """TF_CONFIG of each rank, on ports that are free now and that the kernel gives to nobody by itself."""
    with contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{_bound(stack)}" for _ in range(hosts)]
    return [
        json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
        for rank in range(hosts)
    ]


def _bound(stack: contextlib.ExitStack) -> int:
    """Bind a port below the ephemeral ones, all interfaces, as TensorFlow's server will."""
    while True:
        candidate = stack.enter_context(socket.socket())
        try:
            candidate.bind(("0.0.0.0", random.randrange(12000, 32000)))
        except OSError:
            continue
        return int(candidate.getsockname()[1])
