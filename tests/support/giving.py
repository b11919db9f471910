"""A listener in the test's own process that gives a slab away: whole, up to a point, or with whatever bytes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from keepstep.adapters.peers import PeerServer, Region, Shelf, listen
from keepstep.ports import TlsFiles
from tests.support.slabs import memory_file

STEP, SLAB = 7, 1


@contextlib.contextmanager
def giving(tls: TlsFiles, region: bytes, digest: str, fades_after: int | None = None) -> Iterator[int]:
    """Offer a replicated region as step 7; the port.

    Args:
        fades_after: so many looks at the seal find it while requests are served, one for each request and one for each
            piece; then the slab is written anew. None: it stays.
    """
    looks = 0

    def seals() -> dict[int, tuple[int, int]]:
        nonlocal looks
        if threading.current_thread().name == "peer":
            looks += 1
        return {} if fades_after is not None and looks > fades_after else {SLAB: (STEP, 1)}

    shelf, fd = Shelf(seals), memory_file(region)
    assert shelf.put(SLAB, fd, STEP, digest, Region(0, len(region)))
    os.close(fd)
    listener = listen("127.0.0.1")
    server = PeerServer(listener, tls, shelf)
    server.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.close()
