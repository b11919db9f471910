"""An S3 server that checks what it gets and keeps next to nothing of it: `s3_sink.py CERTIFICATE KEY [keep]`.

Knows what uploads need: objects, parts, conditions, listings, CRC32C, CRC32 and CRC64NVME in headers and in trailers.
What is larger than SMALL_BYTES is summed and thrown away, unless `keep` is said. Serves HTTPS on a port of its own
choice, which it prints.
"""

from __future__ import annotations

import base64
import ssl
import sys
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

from awscrt import checksums

SMALL_BYTES = 4 << 20
_PIECE = 1 << 20
_SUMS: dict[str, tuple[Callable[[bytes | memoryview, int], int], int]] = {
    "x-amz-checksum-crc32c": (checksums.crc32c, 4),
    "x-amz-checksum-crc32": (zlib.crc32, 4),
    "x-amz-checksum-crc64nvme": (checksums.crc64nvme, 8),
}


class Refused(Exception):
    """An answer other than 200: status and S3's code."""


@dataclass
class Stored:
    """An object, or a part of one; `data` is None where it was thrown away."""

    size_bytes: int
    crc: int
    etag: str
    data: bytes | None


@dataclass
class Shelf:
    """What was stored, by path; parts by upload and number."""

    objects: dict[str, Stored] = field(default_factory=dict)
    parts: dict[str, dict[int, Stored]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    uploads: int = 0


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    disable_nagle_algorithm = True  # an answer's body would wait 40 ms for its head to be acknowledged

    protocol_version = "HTTP/1.1"
    shelf = Shelf()
    keeps_bytes = SMALL_BYTES

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_PUT(self) -> None:
        path, query = self._asked()
        self._carry_out(lambda: self._put(path, query))

    def do_POST(self) -> None:
        path, query = self._asked()
        self._carry_out(lambda: self._begin(path) if "uploads" in query else self._complete(path, query))

    def do_HEAD(self) -> None:
        self._carry_out(lambda: self._head(self._asked()[0]))

    def do_GET(self) -> None:
        path, query = self._asked()
        self._carry_out(
            lambda: self._list(path, query) if "list-type" in query or "uploads" in query else self._get(path)
        )

    def do_DELETE(self) -> None:
        path, query = self._asked()
        if "uploadId" in query:
            self.shelf.parts.pop(query["uploadId"], None)
        else:
            self.shelf.objects.pop(path, None)
        self._answer(204)

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return urllib.parse.unquote(url.path), dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def _carry_out(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Refused as refused:
            status, code = refused.args
            self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes | memoryview = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # --- what is asked -----------------------------------------------------------------------------------------------

    def _put(self, path: str, query: dict[str, str]) -> None:
        stored = self._take()
        if "partNumber" in query:
            self.shelf.parts[query["uploadId"]][int(query["partNumber"])] = stored
        else:
            self._store(path, stored)
        self._answer(200, ETag=stored.etag)

    def _store(self, path: str, stored: Stored) -> None:
        with self.shelf.lock:
            known = self.shelf.objects.get(path)
            if self.headers.get("If-None-Match") == "*" and known is not None:
                raise Refused(412, "PreconditionFailed")
            wanted = self.headers.get("If-Match")
            if wanted is not None and (known is None or known.etag != wanted):
                raise Refused(412, "PreconditionFailed")
            self.shelf.objects[path] = stored

    def _begin(self, path: str) -> None:
        with self.shelf.lock:
            self.shelf.uploads += 1
            upload = f"u{self.shelf.uploads}"
            self.shelf.parts[upload] = {}
        body = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        self._answer(200, body.encode())

    def _complete(self, path: str, query: dict[str, str]) -> None:
        self._take()
        parts = self.shelf.parts.pop(query["uploadId"])
        crc, size = 0, 0
        for _, part in sorted(parts.items()):
            crc, size = checksums.combine_crc32c(crc, part.crc, part.size_bytes), size + part.size_bytes
        told = self.headers.get("x-amz-checksum-crc32c")
        if told is not None and "-" not in told and told != base64.b64encode(crc.to_bytes(4, "big")).decode():
            raise Refused(400, "BadDigest")
        etag = _etag(crc, size)
        whole = [part.data for _, part in sorted(parts.items()) if part.data is not None]
        self._store(path, Stored(size, crc, etag, b"".join(whole) if len(whole) == len(parts) else None))
        body = f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, body.encode())

    def _head(self, path: str) -> None:
        stored = self._found(path)
        date = "Wed, 01 Jan 2025 00:00:00 GMT"
        self._answer(200, ETag=stored.etag, Content_Length=str(stored.size_bytes), Last_Modified=date)

    def _get(self, path: str) -> None:
        stored = self._found(path)
        if stored.data is None:
            raise Refused(501, "NotImplemented")
        span = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        data = memoryview(stored.data)[int(span[0] or 0) : int(span[2]) + 1 if span[2] else None]
        self._answer(206 if span[1] else 200, data, ETag=stored.etag)

    def _found(self, path: str) -> Stored:
        stored = self.shelf.objects.get(path)
        if stored is None:
            raise Refused(404, "NoSuchKey")
        return stored

    def _list(self, path: str, query: dict[str, str]) -> None:
        begin = f"{path.rstrip('/')}/"
        keys = sorted(
            each[len(begin) :] for each in self.shelf.objects if each.startswith(begin + query.get("prefix", ""))
        )
        listed = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in keys if "uploads" not in query)
        name = "ListMultipartUploadsResult" if "uploads" in query else "ListBucketResult"
        self._answer(200, f"<{name}><IsTruncated>false</IsTruncated>{listed}</{name}>".encode())

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _take(self) -> Stored:
        """Read a body, check every sum that comes with it, and keep it where it is small."""
        sums = {name: 0 for name in _SUMS if self.headers.get(name) or name in self.headers.get("x-amz-trailer", "")}
        sums.setdefault("x-amz-checksum-crc32c", 0)
        kept, size, trailers = [], 0, dict[str, str]()
        chunked = "aws-chunked" in self.headers.get("Content-Encoding", "")
        for piece in self._chunks(trailers) if chunked else self._pieces(int(self.headers.get("Content-Length", 0))):
            size += len(piece)
            for name in sums:
                sums[name] = _SUMS[name][0](piece, sums[name])
            if size <= self.keeps_bytes:
                kept.append(bytes(piece))
        for name, value in sums.items():
            told = self.headers.get(name) or trailers.get(name)
            is_whole = "uploadId" in self.path and self.command == "POST"  # of the object, not of this body
            if told and not is_whole and told != base64.b64encode(value.to_bytes(_SUMS[name][1], "big")).decode():
                raise Refused(400, "BadDigest")
        crc = sums["x-amz-checksum-crc32c"]
        return Stored(size, crc, _etag(crc, size), b"".join(kept) if size <= self.keeps_bytes else None)

    def _pieces(self, size_bytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_PIECE, max(size_bytes, 1))))
        while size_bytes:
            got = self.rfile.readinto(buffer[: min(len(buffer), size_bytes)])
            if not got:
                raise ConnectionError("the client went away")
            yield buffer[:got]
            size_bytes -= got

    def _chunks(self, trailers: dict[str, str]) -> Iterator[memoryview]:
        """The parts of an `aws-chunked` body, and what follows the last of them."""
        while size := int(self.rfile.readline().partition(b";")[0].strip() or b"0", 16):
            yield from self._pieces(size)
            self.rfile.readline()
        while line := self.rfile.readline().strip():
            name, _, value = line.decode().partition(":")
            trailers[name.strip().lower()] = value.strip()


def _etag(crc: int, size_bytes: int) -> str:
    return f'"{crc:08x}{size_bytes:024x}"'


def main() -> None:
    if sys.argv[3:] == ["keep"]:
        Handler.keeps_bytes = sys.maxsize
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
