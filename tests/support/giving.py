"""A listener in the test's own process that gives a slab away: whole, up to a point, or with whatever bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def refusal(port: int, ca: Path, own: TlsFiles | None) -> str:
    """What a TLS server on this machine says to a client with this certificate, or none, that has sent nothing yet.

    A server that lets it in says nothing, and the test fails.
    """
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    with (
        socket.create_connection(("127.0.0.1", port), 10) as line,
        pytest.raises(ssl.SSLError) as refused,
        context.wrap_socket(line, server_hostname="127.0.0.1") as secured,
    ):
        secured.recv(1)
    return str(refused.value)
