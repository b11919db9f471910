"""Parameter servers: a chief, workers and servers, described to TensorFlow by TF_CONFIG.

As in AWS's toolkit each host runs a parameter server, the first one the chief beside it, each other one a worker. For
`parameter_server`, TensorFlow 2's `ParameterServerStrategy`, each process runs the user's script, which finds in
TF_CONFIG what it is to be. `parameter_server_v1` is what the toolkit makes of its switch: the chief is called master,
and the servers are TensorFlow's own, without the script.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

Role = Literal["ps", "worker", "evaluator", "dispatcher", "feeder"]
SERVED = ("parameter_server", "parameter_server_v1")
"""The strategies in which the first host's worker trains, and all other processes serve it."""


class Task(NamedTuple):
    """One of the processes that serve those that train, by its role and its number within that."""

    role: Role
    number: int


def servers_of(rank: int, evaluates: bool) -> tuple[Task, ...]:
    """What a host runs for the chief; it may run beside it. Who evaluates reads what the chief writes, on its host."""
    if rank:
        return Task("ps", rank), Task("worker", rank - 1)
    return (Task("ps", rank), Task("evaluator", 0)) if evaluates else (Task("ps", rank),)


def tf_config(strategy: str, chiefs: tuple[str, ...], servers: tuple[str, ...], task: Task | None) -> str:
    """TF_CONFIG of one process.

    Args:
        strategy: one of `SERVED`.
        chiefs: addresses of the chief and of the workers, in rank order.
        servers: addresses of the parameter servers, in rank order.
        task: what the process is; None for the chief.
    """
    chief = "master" if strategy == "parameter_server_v1" else "chief"
    cluster = {chief: [chiefs[0]], "worker": list(chiefs[1:]), "ps": list(servers)}
    role, number = task or (chief, 0)
    config = {"cluster": cluster, "environment": "cloud", "task": {"index": number, "type": role}}
    return json.dumps(config, sort_keys=True)
