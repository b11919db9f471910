"""This host as the kernel shows it: processors, memory, pressure, disks, clock, descriptors, heat and network.

What lives here: readings below a root folder, each of which says nothing where the kernel does not. What must never
enter: a judgement of what was read (`core/strains.py`), and a call that may hang, outside of `disks`.
Start reading at `reader`, then `groups`: a container sees figures of the whole machine beside those of its own.
"""

from __future__ import annotations

from keepstep.adapters.host.disks import Disks
from keepstep.adapters.host.reader import HostReader

__all__ = ["Disks", "HostReader"]
