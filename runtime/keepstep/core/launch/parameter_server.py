"""`ParameterServerStrategy`: a chief, workers and parameter servers, described to TensorFlow by TF_CONFIG.

As in AWS's toolkit each host runs a parameter server, the first one the chief beside it, each other one a worker. All
run the user's script, which looks into TF_CONFIG for what it is to be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal, NamedTuple

Role = Literal["ps", "worker"]


class Task(NamedTuple):
    """One of the processes that serve the chief, by its role and its number within that."""

    role: Role
    number: int


def servers_of(rank: int) -> tuple[Task, ...]:
    """What a host runs for the chief; it may run beside it."""
    return (Task("ps", rank),) if rank == 0 else (Task("ps", rank), Task("worker", rank - 1))


def tf_config(chiefs: Iterable[str], servers: Iterable[str], task: tuple[str, int], chief: str) -> str:
    """TF_CONFIG of one process.

    Args:
        chiefs: addresses of the chief and of the workers, in rank order.
        servers: addresses of the parameter servers, in rank order.
        task: the process's role and its index within it.
        chief: what the chief's role is called: TensorFlow 1 says master.
    """
    first, *others = chiefs
    cluster = {chief: [first], "worker": others, "ps": list(servers)}
    role, index = task
    config = {"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": role}}
    return json.dumps(config, sort_keys=True)
