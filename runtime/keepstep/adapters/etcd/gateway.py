"""Blocking requests to one of several etcd endpoints, and the shapes of etcd's JSON."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPSConnectionPool, Timeout
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from keepstep.core.values import frozen
from keepstep.ports import CoordinatorRefused, CoordinatorUnavailable, KeyValue, LeaseGone, Span, TlsFiles

Json = dict[str, Any]

# A host that vanished says nothing: the kernel asks after 2 s of silence, and gives up after three questions.
_SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]

_API = "/v3"
_HEADERS = {"Content-Type": "application/json"}
_OK = 200
_TOLD_MAX = 200  # characters of an answer that a message quotes

# gRPC's codes, as the gateway puts them into the body of an error.
_NOT_FOUND = 5
_REFUSALS = {3, 7, 9, 12, 16}  # invalid argument, permission, precondition, unimplemented, unauthenticated


@frozen
class Request:
    """One request: the path below the API's root, the body, and whether it may be sent a second time."""

    path: str
    body: Json
    repeatable: bool


class _Answered(Exception):
    """An endpoint said no; the text is what it said."""


class _Client:
    """One connection to one endpoint, kept open; no proxy comes between the hosts of a job."""

    def __init__(self, endpoint: str, tls: TlsFiles | None) -> None:
        url = urlsplit(endpoint)
        host, port = str(url.hostname), url.port or 2379
        self.base_url = f"{url.scheme}://{url.netloc if url.port else f'{url.netloc}:{port}'}"
        common: dict[str, Any] = {"maxsize": 1, "retries": False, "socket_options": _SOCKET_OPTIONS}
        if url.scheme == "http":
            self._pool = HTTPConnectionPool(host, port, **common)
        elif tls is None:
            self._pool = HTTPSConnectionPool(host, port, **common)
        else:
            files: dict[str, Any] = {"ca_certs": str(tls.ca), "cert_file": str(tls.cert), "key_file": str(tls.key)}
            self._pool = HTTPSConnectionPool(host, port, **files, **common)

    def post(self, path: str, body: Json, timeout: Timeout, *, whole: bool = True) -> BaseHTTPResponse:
        """Send a body and return the answer, read whole or as a stream.

        Raises:
            HTTPError: it did not arrive, or the answer did not.
        """
        data = json.dumps(body, separators=(",", ":"))
        return self._pool.request(
            "POST", f"{_API}{path}", body=data, headers=_HEADERS, timeout=timeout, preload_content=whole
        )

    def close(self) -> None:
        self._pool.close()


class Endpoints:
    """Where etcd is. It may change: whoever holds this asks at the new ones from the next request on.

    Attributes:
        version: changes with the certificates.
        distrusted: how often one side has not believed the other's certificate.
    """

    def __init__(self, urls: Sequence[str], tls: TlsFiles | None = None) -> None:
        """Check the URLs, such as http://10.0.0.1:2379, at least one; `tls` is what https ones are asked with."""
        self.tls = tls
        self.version = 0
        self.distrusted = 0
        self.use(urls)

    def renew(self) -> None:
        """The files of `tls` are others now: connect anew with them."""
        self.version += 1

    def use(self, urls: Sequence[str]) -> None:
        """Ask these from now on."""
        if not urls:
            raise ValueError("etcd needs at least one endpoint")
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"not an etcd endpoint: {url!r}; wanted is http://HOST:PORT")
        self.urls = tuple(urls)


class Gateway:
    """Requests to whichever endpoint answers, the last good one first. For one thread at a time."""

    def __init__(self, endpoints: Endpoints, timeout_s: float) -> None:
        """Prepare clients without connecting; `timeout_s` is for all attempts; connecting may add half to it."""
        self._endpoints, self._timeout_s = endpoints, timeout_s
        self._urls: tuple[str, ...] = ()
        self._version = 0
        self._clients: list[_Client] = []
        self._attempt_s = timeout_s
        self._preferred = 0
        self._follow()

    def _follow(self) -> None:
        """Have a client for each endpoint as they are now."""
        urls, version = self._endpoints.urls, self._endpoints.version
        if (urls, version) != (self._urls, self._version):
            self.close()
            self._clients = [_Client(url, self._endpoints.tls) for url in urls]
            self._urls, self._version, self._preferred = urls, version, 0
            self._attempt_s = self._timeout_s / len(urls)

    def call(self, request: Request, left_s: Callable[[], float]) -> Json:
        """Send the request until an endpoint answers, as long as `left_s` says that there is time.

        Raises:
            CoordinatorUnavailable: no answer; the request may have been carried out.
            CoordinatorRefused: the request is not acceptable.
            LeaseGone: the lease that it names does not exist.
        """
        self._follow()
        failures, first = [], self._preferred
        for turn in range(len(self._clients)):
            index = (first + turn) % len(self._clients)
            client = self._clients[index]
            patience_s = min(self._attempt_s, left_s())
            if patience_s <= 0:
                failures.append("out of time")
                break
            # Who does not even connect has half of it. Asking elsewhere too soon would add to what keeps etcd busy.
            timeout = Timeout(connect=patience_s / 2, read=patience_s)
            try:
                answer = _answer(client.post(request.path, request.body, timeout))
            except (HTTPError, OSError, _Answered) as error:
                _raise_if_final(error)
                self._endpoints.distrusted += _is_distrust(error)
                failures.append(f"{client.base_url}: {_describe(error)}")
                self._preferred = (index + 1) % len(self._clients)  # or every request would begin with a dead one
                if request.repeatable or _never_sent(error):
                    continue
                break
            self._preferred = index
            return answer
        raise CoordinatorUnavailable("; ".join(failures))

    def stream(self, path: str, body: Json, idle_s: float) -> BaseHTTPResponse:
        """Open a streamed answer at the endpoint that answered last; reading it fails after `idle_s` of silence.

        Raises:
            CoordinatorUnavailable: it could not be opened.
        """
        self._follow()
        client = self._clients[self._preferred]
        try:
            timeout = Timeout(connect=self._attempt_s / 2, read=idle_s)
            response = client.post(path, body, timeout, whole=False)
        except (HTTPError, OSError) as error:
            self._preferred = (self._preferred + 1) % len(self._clients)
            raise CoordinatorUnavailable(f"{client.base_url}: {error}") from error
        if response.status != _OK:
            text = response.read(_TOLD_MAX).decode(errors="replace")
            response.close()
            raise CoordinatorUnavailable(f"{client.base_url}: {response.status} {text}")
        return response

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _answer(response: BaseHTTPResponse) -> Json:
    """Raises: _Answered where the endpoint says no, or what is no JSON."""
    text = response.data.decode(errors="replace")
    if response.status != _OK:
        raise _Answered(text or str(response.status))
    try:
        answer: Json = json.loads(text)
    except ValueError as error:
        raise _Answered(f"no JSON: {text[:_TOLD_MAX]}") from error
    return answer


def _raise_if_final(error: Exception) -> None:
    """Raise what no other endpoint would answer differently."""
    code = _details(error).get("code")
    if code == _NOT_FOUND:
        raise LeaseGone(_describe(error)) from error
    if code in _REFUSALS:
        raise CoordinatorRefused(_describe(error)) from error


def _details(error: Exception) -> Json:
    try:
        details = json.loads(str(error)) if isinstance(error, _Answered) else {}
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def _describe(error: Exception) -> str:
    text = _details(error).get("error") or str(error)
    return str(text).strip()[:300] or type(error).__name__


def _is_distrust(error: BaseException | None) -> bool:
    """True where a certificate was not believed, here or at the other end, which tells so by an alert."""
    while error is not None:
        if isinstance(error, SSLError) or "alert" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _never_sent(error: Exception) -> bool:
    """True where there was no connection to send anything over, so that sending elsewhere can not do it twice."""
    return isinstance(error, NewConnectionError | ConnectTimeoutError)


def encode(text: str) -> str:
    """Return text as etcd's JSON wants keys and values: base64 of its UTF-8."""
    return base64.b64encode(text.encode()).decode()


def decode(text: str) -> str:
    """Return the text of a key or value; what a stranger wrote that is not UTF-8 must not stop the reading."""
    return base64.b64decode(text).decode(errors="replace")


def prefix_range(prefix: str, span: Span | None = None) -> Json:
    """Return the fields that select every key beginning with `prefix`, all for an empty one; or a span of those."""
    if span is not None:
        return {"key": encode(prefix + span[0]), "range_end": encode(prefix + span[1])}
    if not prefix:
        return {"key": base64.b64encode(b"\0").decode(), "range_end": base64.b64encode(b"\0").decode()}
    # The last byte of UTF-8 is never 0xff, so adding one stays a byte.
    raw = prefix.encode()
    return {"key": encode(prefix), "range_end": base64.b64encode(raw[:-1] + bytes([raw[-1] + 1])).decode()}


def key_values(answer: Json) -> list[KeyValue]:
    """Return the keys of a range answer, in the order given."""
    return [
        KeyValue(decode(kv["key"]), decode(kv.get("value", "")), int(kv["mod_revision"]), int(kv.get("lease", 0)))
        for kv in answer.get("kvs", ())
    ]
