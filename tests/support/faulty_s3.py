"""A proxy before an S3 server that does what S3, and the way to it, do at times; what and how often is said by `rates`.

slow_down: 503 SlowDown instead of an answer. cut: the connection ends in the middle of the request's body. lost_answer:
the server carries the request out, and the connection ends instead of the answer. late_error: what completes an upload
is answered 200 at once and an error later, in the body. throttle: request and answer pass slowly. flipped_up,
flipped_down: one bit of the request's or the answer's body is wrong; unless the rate is 1, at most two answers in a row
for one path, since an object that is wrong three times is given up, as it should be.
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = ("slow_down", "cut", "lost_answer", "late_error", "throttle", "flipped_up", "flipped_down")
THROTTLED_BYTES_PER_S = 1 << 20
THROTTLED_S_MAX = 3.0
FLIPPED_DOWN_IN_A_ROW = 2
LATE_S = 0.3
_PIECE = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "date", "server"}
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_LATE_ERROR = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


class _Cut(Exception):
    """The connection is to end here."""


class FaultyS3:
    """Serves from `with` to its end; `counts` says how often each fault was done, and "requests"."""

    def __init__(self, target: str, rates: Mapping[str, float], seed: int = 0) -> None:
        """Prepare.

        Args:
            target: the server, as in http://127.0.0.1:9000.
            rates: the chance of each kind of fault for a request that it can befall; what is not named does not occur.
            seed: of the dice. Which request is hit depends on the order in which they come, too.
        """
        unknown = set(rates) - set(KINDS)
        assert not unknown, f"no faults: {unknown}"
        self.counts: Counter[str] = Counter()
        self._flipped_down: Counter[str] = Counter()  # in a row, by path
        self._target = target.removeprefix("http://")
        self._rates, self._random, self._lock = dict(rates), random.Random(seed), threading.Lock()
        proxy = self

        class Handler(_Handler):
            faults = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyS3:
        threading.Thread(target=self._server.serve_forever, name="faulty-s3", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def befalls(self, kind: str) -> bool:
        """Throw the dice."""
        with self._lock:
            hit = self._random.random() < self._rates.get(kind, 0.0)
            self.counts[kind] += hit
            return hit

    def befalls_answer(self, path: str) -> bool:
        """Throw the dice for a bit of the answer to `path`."""
        rate = self._rates.get("flipped_down", 0.0)
        with self._lock:
            spared = rate < 1.0 and self._flipped_down[path] >= FLIPPED_DOWN_IN_A_ROW
            hit = not spared and self._random.random() < rate
            self._flipped_down[path] = self._flipped_down[path] + 1 if hit else 0
            self.counts["flipped_down"] += hit
            return hit

    def seen(self) -> None:
        with self._lock:
            self.counts["requests"] += 1

    def flip(self, body: bytes) -> bytes:
        """The body with one bit wrong."""
        with self._lock:
            at, bit = self._random.randrange(len(body)), self._random.randrange(8)
        return body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._target, timeout=60)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless the client is gone: those that are killed hang up in mid-request."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection; requests are passed on one after the other."""

    protocol_version = "HTTP/1.1"
    faults: FaultyS3

    def setup(self) -> None:
        super().setup()
        self._server = self.faults.connect()

    def finish(self) -> None:
        self._server.close()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _pass_on(self) -> None:
        self.faults.seen()
        try:
            self._play()
        except (_Cut, OSError, http.client.HTTPException):
            self._server.close()
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _play(self) -> None:
        faults, size = self.faults, int(self.headers.get("Content-Length") or 0)
        if size and faults.befalls("cut"):
            self.rfile.read(size // 2)
            raise _Cut
        slowly = faults.befalls("throttle")
        body = self._read(size, slowly)
        if faults.befalls("slow_down"):
            self._answer(503, {"Content-Type": "application/xml"}, _SLOW_DOWN, slowly)
            return
        if self.command == "POST" and "uploadId=" in self.path and faults.befalls("late_error"):
            self._say_error_late()
            return
        if body and self.command == "PUT" and faults.befalls("flipped_up"):
            body = faults.flip(body)
        status, headers, answer = self._ask(body)
        if self.command != "GET" and faults.befalls("lost_answer"):
            raise _Cut
        if answer and self.command == "GET" and status < 300 and "list-type" not in self.path:
            answer = faults.flip(answer) if faults.befalls_answer(self.path) else answer
        self._answer(status, headers, answer, slowly)

    def _read(self, size: int, slowly: bool) -> bytes:
        pieces, left = [], size
        while left:
            piece = self.rfile.read(min(_PIECE, left))
            if not piece:
                raise _Cut
            pieces.append(piece)
            left -= len(piece)
            self._hold_up(len(piece), size, slowly)
        return b"".join(pieces)

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        headers["Content-Length"] = str(len(body))
        self._server.request(self.command, self.path, body, headers)
        response = self._server.getresponse()
        answer = response.read()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
        if self.command == "HEAD":
            kept["Content-Length"] = response.getheader("Content-Length") or "0"
        return response.status, kept, answer

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, slowly: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(0, len(body), _PIECE):
            self.wfile.write(body[at : at + _PIECE])
            self._hold_up(min(_PIECE, len(body) - at), len(body), slowly)

    def _hold_up(self, passed: int, whole: int, slowly: bool) -> None:
        if slowly:
            time.sleep(min(passed / THROTTLED_BYTES_PER_S, THROTTLED_S_MAX * passed / whole))

    def _say_error_late(self) -> None:
        """The upload is not completed; S3 says 200 before it knows, sends spaces meanwhile, and an error at last."""
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (b"<?xml version='1.0' encoding='UTF-8'?>\n", b" ", _LATE_ERROR, b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            time.sleep(LATE_S / 3)
