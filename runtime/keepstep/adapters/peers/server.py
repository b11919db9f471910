"""The listener: it gives what is on the shelf to whoever has a certificate of this job.

Hosts that have no certificates give each other nothing: then it answers trials alone, without TLS.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.adapters.peers.lines import VERSION, read_line, send_line, tls_context
from keepstep.adapters.peers.shelf import Offer, Shelf
from keepstep.ports import TlsFiles, Wanted

CONNECTIONS_MAX = 32
GIVEN_BYTES = 1 << 19
"""In a piece, as it is read and as it is sent: what a core's own cache holds."""
STALL_S = 10.0
"""A peer that asks nothing and takes nothing for so long is hung up on."""
WAIT_S_MAX = 60.0
"""How long a request may be held until what it asks for has come."""
_LOOK_S = 1.0
_BACKLOG = 64

Also = Callable[[socket.socket, Mapping[str, Any]], bool]
"""Answers another kind of request on the same connections; False where it is none of its own."""


def listen(address: str) -> socket.socket:
    """A socket for the listener, at any free port of this address; a name's are not known, so of all there are.

    Raises:
        OSError: it can not be had.
    """
    try:
        host = str(ipaddress.ip_address(address))
    except ValueError:
        host = "0.0.0.0"
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG)


class PeerServer:
    """Gives what is on the shelf to whoever has a certificate of this job."""

    def __init__(
        self, listener: socket.socket, tls: TlsFiles | None, shelf: Shelf, also: Also = lambda line, asked: False
    ) -> None:
        self._listener, self._tls, self._shelf, self._also = listener, tls, shelf, also
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._closed = threading.Event()

    def start(self) -> None:
        """Serve in threads of its own, as long as the process lives or until `close`."""
        self._listener.settimeout(_LOOK_S)
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._shelf.prune()
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # too many descriptors, or the other side was gone already
                self._closed.wait(_LOOK_S)
                continue
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(line,), name="peer", daemon=True).start()
            else:
                line.close()
        self._listener.close()

    def _serve(self, line: socket.socket) -> None:
        try:
            with line:
                line.settimeout(STALL_S)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._secured(line) as secured:
                    while self._answer(secured):
                        pass
        except (OSError, ValueError):  # no certificate of this job, a broken line, nonsense: there is nobody to tell
            pass
        finally:
            self._slots.release()

    def _secured(self, line: socket.socket) -> socket.socket:
        return line if self._tls is None else tls_context(ssl.PROTOCOL_TLS_SERVER, self._tls).wrap_socket(line, True)

    def _answer(self, line: socket.socket) -> bool:
        """Answer one request; False at the end of the line."""
        asked = read_line(line)
        if asked is None:
            return False
        if asked.get("version") != VERSION:
            send_line(line, {"ok": False, "error": "version"})
            return True
        if "trial" in asked or self._tls is None:
            return self._also(line, asked)
        step, start, size = (_natural(asked, name) for name in ("step", "start", "size"))
        wait_s = min(WAIT_S_MAX, float(_natural(asked, "wait"))) if "wait" in asked else 0.0
        with self._shelf.taken(Wanted(step, str(asked.get("digest")), start, size, wait_s)) as offer:
            if offer is None or not self._shelf.stands(offer):
                send_line(line, {"ok": False, "error": "absent"})
            elif not size or start + size > offer.region.size_bytes:
                send_line(line, {"ok": False, "error": "range"})
            else:
                send_line(line, {"ok": True})
                return self._give(line, offer, start, size)
        return True

    def _give(self, line: socket.socket, offer: Offer, start: int, size: int) -> bool:
        """Send a range; False where the slab is not what it was any more: then what was sent is not all."""
        at, end = offer.region.start + start, offer.region.start + start + size
        piece = memoryview(bytearray(min(GIVEN_BYTES, size)))
        while at < end:
            got = os.preadv(offer.fd, [piece[: end - at]], at)
            if not got or not self._shelf.stands(offer):
                return False
            line.sendall(piece[:got])
            at += got
        return True


def _natural(message: Mapping[str, Any], field: str) -> int:
    value = message.get(field)
    if type(value) is not int or value < 0:
        raise ValueError(f"{field} must be a whole number")
    return value
