"""An instance's metadata service as EC2's version 2 answers, on this machine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MetadataService:
    """What the service says now.

    Attributes:
        documents: what is found below /latest/meta-data/.
        tokens: those that count; a test that empties it makes all of them too old.
        has_tokens: False for a service that knows version 1 alone.
    """

    def __init__(self) -> None:
        self.documents: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.has_tokens = True
        self.endpoint = ""
        self._given = 0

    def take_away(self, at: float) -> None:
        """Have the Spot instance end at that time, in unix seconds."""
        time = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.documents["spot/instance-action"] = json.dumps({"action": "terminate", "time": time})

    def recommend(self) -> None:
        """Have the instance be at an elevated risk."""
        self.documents["events/recommendations/rebalance"] = json.dumps({"noticeTime": "2026-01-02T03:04:05Z"})

    def token(self) -> str:
        self._given += 1
        self.tokens.add(token := f"token-{self._given}")
        return token


@contextlib.contextmanager
def metadata_service() -> Iterator[MetadataService]:
    """A service that knows of no end yet."""
    service = MetadataService()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            asked = self.path == "/latest/api/token" and self.headers["x-aws-ec2-metadata-token-ttl-seconds"]
            self._answer(200, service.token()) if asked and service.has_tokens else self._answer(404, "")

        def do_GET(self) -> None:
            text = service.documents.get(self.path.removeprefix("/latest/meta-data/"))
            if self.headers.get("x-aws-ec2-metadata-token") not in service.tokens:
                self._answer(401, "")
            elif text is None:
                self._answer(404, "")
            else:
                self._answer(200, text)

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.endpoint = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
