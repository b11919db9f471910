"""The one who asks: another host's listener, for a range of a snapshot that it holds, or that is coming to it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable

from keepstep.adapters.clock import monotonic
from keepstep.adapters.peers.lines import VERSION, read_line, send_line, tls_context
from keepstep.ports import PeerAway, PeerLacks, TlsFiles, Wanted

PIECE_BYTES = 1 << 20


class TlsPeer:
    """Another host's listener, asked through as many connections as there are threads that ask."""

    def __init__(self, name: str, address: str, port: int, tls: TlsFiles) -> None:
        self._name, self._address, self._port, self._tls = name, address, port, tls
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    @property
    def name(self) -> str:
        return self._name

    def read(self, wanted: Wanted, take: Callable[[memoryview], None], deadline: float) -> None:
        """See `Peer`."""
        try:
            line = self._connected(deadline)
        except (OSError, ValueError) as error:
            raise PeerAway(_said(error)) from error
        try:
            self._ask(line, wanted, take, deadline)
        except PeerLacks:
            self._keep(line)
            raise
        except (OSError, ValueError) as error:
            line.close()
            raise PeerAway(_said(error)) from error
        except PeerAway:
            line.close()
            raise
        self._keep(line)

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _keep(self, line: socket.socket) -> None:
        with self._lock:
            self._idle.append(line)

    def _connected(self, deadline: float) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return connect(self._address, self._port, self._tls, deadline)

    def _ask(self, line: socket.socket, wanted: Wanted, take: Callable[[memoryview], None], deadline: float) -> None:
        asked = {"step": wanted.step, "digest": wanted.digest, "start": wanted.start, "size": wanted.size_bytes}
        asked |= {"wait": int(wanted.wait_s)} if wanted.wait_s >= 1.0 else {}
        line.settimeout(_left(deadline))
        send_line(line, {"version": VERSION, **asked})
        answer = read_line(line)
        if answer is None:
            raise PeerAway("it hung up")
        if answer.get("ok") is not True:
            if answer.get("error") == "absent":
                raise PeerLacks(f"it does not hold step {wanted.step} with this digest")
            raise PeerAway(f"it refuses: {str(answer.get('error'))[:40]}")
        buffer = memoryview(bytearray(min(PIECE_BYTES, wanted.size_bytes)))
        left = wanted.size_bytes
        while left:
            filled, room = 0, min(len(buffer), left)
            line.settimeout(_left(deadline))  # for a piece: a record is 16 KiB, and each call of it costs as much
            while filled < room:
                got = line.recv_into(buffer[filled:room])
                if not got:
                    raise PeerAway(f"it broke off {left - filled} bytes before the end")
                filled += got
            take(buffer[:room])
            left -= room


def connect(address: str, port: int, tls: TlsFiles | None, deadline: float) -> socket.socket:
    """A connection to another host's listener, without TLS where there are no certificates.

    Raises:
        PeerAway, OSError, ValueError: there is none.
    """
    line = socket.create_connection((address, port), _left(deadline))
    try:
        line.settimeout(_left(deadline))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each request would wait 40 ms for the last one
        if tls is None:
            return line
        return tls_context(ssl.PROTOCOL_TLS_CLIENT, tls).wrap_socket(line, server_hostname=address)
    except (OSError, ValueError, PeerAway):
        line.close()
        raise


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise PeerAway("it is too slow")
    return left


def _said(error: Exception) -> str:
    return "it is too slow" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
