"""The guest in the training process: standard library only, TensorFlow imported lazily, Python 3.9 and later."""

from __future__ import annotations

__version__ = "0.1.0"
