"""The guest in the training process: it says where the training stands, and does what the agent asks.

What lives here: the bootstrap, what wraps `Model.fit`, three lines for custom loops (`join`), the wire to the agent.
What must never enter: an import of anything but the standard library on loading (TensorFlow, Keras and NumPy only
inside functions), or syntax newer than Python 3.9. Start reading at `wire`, which the agent reads too, then `session`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep_worker.feeding import data_service
    from keepstep_worker.run import Run, join

__version__ = "0.1.0"
__all__ = ["Run", "data_service", "join"]


def __getattr__(name: str) -> Any:
    """Import the run API on first use: the agent imports this package for `wire` alone."""
    if name == "data_service":
        from keepstep_worker import feeding

        return feeding.data_service
    if name in __all__:
        from keepstep_worker import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
