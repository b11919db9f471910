"""tf.data's service: hosts that read and prepare data for those that train.

The first of the feeding hosts runs the dispatcher, each of them a worker. Both are replaced in their place when they
die: the dispatcher has a journal, a worker is given what is left to do.
"""

from __future__ import annotations

from typing import Final

from keepstep.core.launch.parameter_server import Task

DISPATCHER: Final = "dispatcher"
FEEDER: Final = "feeder"
PROTOCOL = "grpc"


def tasks_of(position: int) -> tuple[Task, ...]:
    """What a feeding host runs, by its place among them."""
    own = Task(FEEDER, position)
    return (Task(DISPATCHER, 0), own) if position == 0 else (own,)
