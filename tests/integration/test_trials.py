"""How fast the line between two hosts is, asked of the very process that gives slabs away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.adapters import trials
from keepstep.adapters.certificates import make_authority
from keepstep.adapters.peers import PeerServer, Shelf, connect, listen
from keepstep.adapters.trials import SIZE_BYTES_MAX, Trial, answer_trial, try_line
from keepstep.ports import TlsFiles
from tests.support.etcd import make_tls
from tests.support.uploading import good, started

pytestmark = pytest.mark.integration


@pytest.fixture(params=["tls", "plain"])
def tls(request, tmp_path: Path) -> TlsFiles | None:
    return make_tls(tmp_path / "tls", make_authority("job", time.time())) if request.param == "tls" else None


@pytest.fixture
def port(tls: TlsFiles | None) -> Iterator[int]:
    listener = listen("127.0.0.1")
    server = PeerServer(listener, tls, Shelf(dict), answer_trial)
    server.start()
    yield int(listener.getsockname()[1])
    server.close()


def tried(port: int, tls: TlsFiles | None, seconds: float = 10.0) -> Trial:
    return try_line(lambda: connect("127.0.0.1", port, tls, time.monotonic() + 10), time.monotonic() + seconds)


def test_a_line_is_measured_both_ways_and_clocks_are_compared(port, tls, monkeypatch):
    monkeypatch.setattr(trials, "WAY_S", 60.0)  # a busy machine may stand still before a byte has gone over it
    found = tried(port, tls, 100.0)
    assert found.sent > 0 and found.received > 0
    assert abs(found.ahead_s) < 1.0


@pytest.mark.parametrize("asked", [{"size": SIZE_BYTES_MAX + 1}, {"size": -1}, {"size": "1"}, {"trial": "more"}])
def test_what_is_no_trial_ends_the_line(port, tls, asked):
    with connect("127.0.0.1", port, tls, time.monotonic() + 10) as line:
        line.sendall(json.dumps({"version": 1, "trial": "give", "size": 1, **asked}).encode() + b"\n")
        assert line.recv(100) == b""


def test_without_certificates_nothing_else_is_answered():
    listener = listen("127.0.0.1")
    server = PeerServer(listener, None, Shelf(dict), answer_trial)
    server.start()
    with connect("127.0.0.1", listener.getsockname()[1], None, time.monotonic() + 10) as line:
        line.sendall(b'{"version":1,"step":7,"digest":"d","start":0,"size":1}\n')
        assert line.recv(100) == b""
    server.close()
    listener.close()


@contextlib.contextmanager
def deaf(answers: bytes = b"") -> Iterator[int]:
    """A host that takes connections, says so much, and then neither reads nor writes."""
    kept: list[socket.socket] = []

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = server.accept()
                kept.append(line)
                line.sendall(answers)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()  # it may just have taken another line
    for line in kept:
        line.close()


def test_a_host_that_does_not_answer_is_given_up():
    with deaf() as port, pytest.raises(TimeoutError):
        tried(port, None, 0.3)


def test_a_host_that_takes_no_more_has_the_rate_that_it_had():
    """Told by what it was sent until then; the other way it gives nothing at all."""
    with deaf(b'{"ok":true,"unix":0}\n' * 3) as port, pytest.raises(TimeoutError):
        tried(port, None, 0.5)


def test_the_uploader_tries_lines_and_names_those_that_are_none(tls):
    async def scenario() -> list[dict[str, object]]:
        async with started() as client:
            listener = listen("127.0.0.1")
            files = {} if tls is None else {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)}
            await good(client, listener.fileno(), command="listen", **files)
            port = listener.getsockname()[1]
            with socket.create_server(("127.0.0.1", 0)) as closed:
                gone = closed.getsockname()[1]
            peers = [("algo-2", "127.0.0.1", port), ("algo-3", "127.0.0.1", gone)]
            reply = await good(client, command="try", peers=peers)
            listener.close()
            return reply["links"]  # type: ignore[no-any-return]

    there, gone = asyncio.run(scenario())
    assert there["peer"] == "algo-2" and there["sent"] > 0 and there["received"] > 0
    assert gone == {"peer": "algo-3", "error": "[Errno 111] Connection refused"}
