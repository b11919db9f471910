"""Parameter servers' chief: an end that can hang, mended.

A `ClusterCoordinator` that is collected only when the interpreter ends stops its cluster then, and waits for a lock. If
a worker was lost before, a thread of its own may hold that lock, and no thread runs any more at that time: the chief,
which has done all its work, would never exit. Seen with TensorFlow 2.21.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def install(module: Any) -> None:
    """Wrap what a coordinator does at its end, in `cluster_coordinator` that was just executed."""
    coordinator = getattr(module, "ClusterCoordinator", None)
    if coordinator is None or "__del__" not in vars(coordinator):
        return
    original = coordinator.__del__

    @functools.wraps(original)
    def end(self: Any) -> None:
        if not sys.is_finalizing():
            original(self)

    coordinator.__del__ = end
