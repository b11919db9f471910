"""Hosts give each other the bytes of snapshots: what there is (`shelf`), who gives it (`server`), who asks (`peer`).

Mutual TLS 1.3. A request is one line of JSON, {version, step, digest, start, size, [wait]}; `start` counts from the
beginning of the replicated region. The answer is a line, {ok, [error]}, with `size` bytes behind it where ok is true;
it may come up to `wait` seconds later where the bytes are on their way to the host that is asked. A connection serves
one request after another. Where a slab is written anew meanwhile the connection ends, so that the other side has too
few bytes and never torn ones.
"""

from __future__ import annotations

from keepstep.adapters.peers.peer import TlsPeer, connect
from keepstep.adapters.peers.server import PeerServer, listen
from keepstep.adapters.peers.shelf import Coming, Region, Shelf

__all__ = ["Coming", "PeerServer", "Region", "Shelf", "TlsPeer", "connect", "listen"]
