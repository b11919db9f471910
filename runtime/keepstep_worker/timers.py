"""TensorFlow's own patience with its peers: bounded by the policy where the script says nothing of it.

By default a worker waits an hour for a peer that never comes. The strategies name no times when they configure the
coordination service, so what they leave out is filled in; and who leads it is waited for (`meeting.py`).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from keepstep_worker.meeting import await_leader

_VARIABLES = {
    "heartbeat_timeout_in_ms": "KEEPSTEP_HEARTBEAT_S",
    "cluster_register_timeout_in_ms": "KEEPSTEP_REGISTER_S",
}


def install(module: Any) -> None:
    """Wrap what configures the coordination service, in `tensorflow.python.eager.context` that was just executed."""
    context = getattr(module, "Context", None)
    if context is not None and "configure_coordination_service" in vars(context):
        context.configure_coordination_service = _wrapped(context.configure_coordination_service)


def presets() -> dict[str, int]:
    """Return the times that the policy names, in milliseconds, by TensorFlow's names."""
    found = {}
    for name, variable in _VARIABLES.items():
        try:
            found[name] = max(1, int(float(os.environ[variable]) * 1000))
        except (KeyError, ValueError):
            continue
    return found


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def configure(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        for name, value in presets().items():
            if name in signature.parameters and not bound.arguments.get(name):
                bound.arguments[name] = value
        await_leader(str(bound.arguments.get("service_leader", "")))
        return original(*bound.args, **bound.kwargs)

    return configure
