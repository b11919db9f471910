"""The forerunner: a worker's process that was begun before its world was known.

It has a worker's command line and environment, but for what its world puts there, and has done nothing yet that the
script could notice. What whoever started the interpreter has put into the environment stays.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping

from keepstep_worker import identity, standby
from keepstep_worker.channel import Channel

_FORERUNNER_FD = "KEEPSTEP_FORERUNNER_FD"


def is_forerunner(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process was started before its world was known."""
    return _FORERUNNER_FD in environ


def await_world() -> None:
    """Wait until this process is told which worker it is.

    When this returns, environment and descriptors are that worker's. The process ends where the agent hangs up.
    """
    channel = Channel.from_fd(int(os.environ.pop(_FORERUNNER_FD)))
    # it was started before the agent listened to any
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    wire_fd, socket_fd, world_fd = standby.awaited(channel)
    channel.close()
    with os.fdopen(world_fd, "rb") as file:
        environment: dict[str, str] = json.load(file)["environment"]
    os.environ.update({**environment, **identity.descriptor_variables(wire_fd, socket_fd)})
