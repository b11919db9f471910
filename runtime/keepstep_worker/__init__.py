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
    from keepstep_worker.sources import Loaded
    from keepstep_worker.tfrecords import TfRecords

__version__ = "0.1.0"
__all__ = ["Loaded", "Run", "TfRecords", "data_service", "join"]


_PLACES = {
    "Loaded": "sources", "Run": "run", "TfRecords": "tfrecords", "data_service": "feeding", "join": "run",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what scripts use on first use: the agent imports this package for `wire` alone."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
