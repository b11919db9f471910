"""Hosts give each other the bytes of sealed, verified slabs: the listener, what it has to give, and the one who asks.

Mutual TLS 1.3 with the job's own authority and no other. A request is one line of JSON, {version, step, digest, start,
size}; `start` counts from the beginning of the replicated region. The answer is a line, {ok, [error]}, with `size`
bytes behind it where ok is true. A connection serves one request after another. Where the slab is written anew
meanwhile the connection ends, so that the other side has too few bytes and never torn ones.

Hosts that have no certificates give each other nothing: then the listener, without TLS, answers trials alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keepstep.adapters.clock import monotonic
from keepstep.core.values import frozen
from keepstep.ports import PeerAway, PeerLacks, TlsFiles, Wanted

VERSION = 1
LINE_BYTES_MAX = 512
CONNECTIONS_MAX = 16
PIECE_BYTES = 1 << 20
GIVEN_BYTES = 1 << 19
"""In a piece, as it is read and as it is sent: what a core's own cache holds."""
STALL_S = 10.0
"""A peer that asks nothing and takes nothing for so long is hung up on."""
_LOOK_S = 1.0
_BACKLOG = 64

Also = Callable[[socket.socket, Mapping[str, Any]], bool]
"""Answers another kind of request on the same connections; False where it is none of its own."""

Seals = Callable[[], Mapping[int, tuple[int, int]]]
"""Step and sequence of each sealed slab, as the control page says now."""


@frozen
class Region:
    """Where a slab's replicated region lies: bytes from the file's beginning."""

    start: int
    size_bytes: int


@frozen
class Offer:
    """A verified slab: its file, what it holds, and the sequence of its seal."""

    slab: int
    fd: int
    step: int
    sequence: int
    digest: str
    region: Region


class Shelf:
    """The slabs that other hosts may have; a slab whose seal is gone, or another one, is not among them."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals
        self._lock = threading.Lock()
        self._offers: dict[int, Offer] = {}

    def put(self, slab: int, fd: int, step: int, digest: str, region: Region) -> bool:
        """Offer a slab; False where it is not sealed with that step. The descriptor stays the caller's."""
        at, sequence = self._seals().get(slab, (-1, -1))
        if at != step:
            return False
        with self._lock:
            self._forget(slab)
            self._offers[slab] = Offer(slab, os.dup(fd), step, sequence, digest, region)
        return True

    def stands(self, offer: Offer) -> bool:
        """Whether the slab holds what it held when it was offered."""
        return self._seals().get(offer.slab) == (offer.step, offer.sequence)

    def prune(self) -> None:
        """Let go of the memory of slabs that were written anew or dropped."""
        with self._lock:
            for offer in list(self._offers.values()):
                if not self.stands(offer):
                    self._forget(offer.slab)

    @contextlib.contextmanager
    def taken(self, step: int, digest: str) -> Iterator[Offer | None]:
        """The offer that is asked for, kept while it is read."""
        with self._lock:
            found = next((o for o in self._offers.values() if (o.step, o.digest) == (step, digest)), None)
            fd = -1 if found is None else os.dup(found.fd)
        if found is None:
            yield None
            return
        try:
            yield Offer(found.slab, fd, found.step, found.sequence, found.digest, found.region)
        finally:
            os.close(fd)

    def _forget(self, slab: int) -> None:
        gone = self._offers.pop(slab, None)
        if gone is not None:
            os.close(gone.fd)


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
        return line if self._tls is None else _context(ssl.PROTOCOL_TLS_SERVER, self._tls).wrap_socket(line, True)

    def _answer(self, line: socket.socket) -> bool:
        """Answer one request; False at the end of the line."""
        asked = _read_line(line)
        if asked is None:
            return False
        if asked.get("version") != VERSION:
            _send_line(line, {"ok": False, "error": "version"})
            return True
        if "trial" in asked or self._tls is None:
            return self._also(line, asked)
        step, start, size = (_natural(asked, name) for name in ("step", "start", "size"))
        with self._shelf.taken(step, str(asked.get("digest"))) as offer:
            if offer is None or not self._shelf.stands(offer):
                _send_line(line, {"ok": False, "error": "absent"})
            elif not size or start + size > offer.region.size_bytes:
                _send_line(line, {"ok": False, "error": "range"})
            else:
                _send_line(line, {"ok": True})
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
        line.settimeout(_left(deadline))
        _send_line(line, {"version": VERSION, **asked})
        answer = _read_line(line)
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
        return _context(ssl.PROTOCOL_TLS_CLIENT, tls).wrap_socket(line, server_hostname=address)
    except (OSError, ValueError, PeerAway):
        line.close()
        raise


def _context(protocol: ssl._SSLMethod, tls: TlsFiles) -> ssl.SSLContext:
    """Made for each connection: the files may have been replaced."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise PeerAway("it is too slow")
    return left


def _said(error: Exception) -> str:
    return "it is too slow" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _send_line(line: socket.socket, message: Mapping[str, object]) -> None:
    line.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def _read_line(line: socket.socket) -> dict[str, Any] | None:
    """One line of JSON, read byte by byte so that nothing behind it is taken; None at the end.

    Raises:
        ValueError: it is none.
    """
    taken = bytearray()
    while not taken.endswith(b"\n"):
        got = line.recv(1)
        if not got and not taken:
            return None
        if not got or len(taken) >= LINE_BYTES_MAX:
            raise ValueError("no line of JSON")
        taken += got
    message = json.loads(taken)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _natural(message: Mapping[str, Any], field: str) -> int:
    value = message.get(field)
    if type(value) is not int or value < 0:
        raise ValueError(f"{field} must be a whole number")
    return value
