"""What both ends of a line between hosts use: TLS with the job's own authority and no other, and lines of JSON."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from keepstep.ports import TlsFiles

VERSION = 1
LINE_BYTES_MAX = 512


def tls_context(protocol: ssl._SSLMethod, tls: TlsFiles) -> ssl.SSLContext:
    """Made for each connection: the files may have been replaced."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def send_line(line: socket.socket, message: Mapping[str, object]) -> None:
    line.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def read_line(line: socket.socket) -> dict[str, Any] | None:
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
