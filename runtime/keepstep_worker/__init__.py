"""The guest in the training process: it says where the training stands, and does what the agent asks.

What lives here: the bootstrap, what wraps `Model.fit`, and the wire to the agent. What must never enter: an import of
anything but the standard library on loading (TensorFlow, Keras and NumPy only inside functions), or syntax newer than
Python 3.9. Start reading at `wire`, which the agent reads too.
"""

from __future__ import annotations

__version__ = "0.1.0"
