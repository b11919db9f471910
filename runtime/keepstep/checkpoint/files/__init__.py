"""Checkpoint files that a script writes by itself: which of them are whole, and copies of them that stay so.

What lives here: readers of TensorFlow's tensor bundles and of what Keras writes, which files of a folder make a set,
who still writes to them, and the copying of a set. What must never enter: TensorFlow, Keras or h5py (the agent has none
of them), a store, a clock, a decision about when to look.
Start reading at `sets` (what belongs together), then `contents` (whether it is whole), then `writers` (copying it).
"""

from __future__ import annotations
