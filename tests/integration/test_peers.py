"""Who is let in to what hosts give each other, and what is given."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.adapters.certificates import Authority, make_authority
from keepstep.adapters.peers import PeerServer, Region, Shelf, TlsPeer, listen
from keepstep.adapters.peers.peer import PIECE_BYTES
from keepstep.adapters.peers.server import CONNECTIONS_MAX, GIVEN_BYTES
from keepstep.ports import PeerAway, PeerLacks, TlsFiles, Wanted
from tests.support.etcd import make_tls
from tests.support.giving import SLAB, STEP, giving, refusal
from tests.support.slabs import held, memory_file

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("job", time.time())


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> TlsFiles:
    return make_tls(tmp_path / "tls", authority)


# --- who gets in -----------------------------------------------------------------------------------------------------

CONTENT = os.urandom(3 << 20)


@pytest.fixture
def seals() -> dict[int, tuple[int, int]]:
    return {SLAB: (STEP, 4)}


@pytest.fixture
def port(tls: TlsFiles, seals: dict[int, tuple[int, int]]) -> Iterator[int]:
    """A listener that offers step 7 with the digest `d`: all of CONTENT but its first 8 bytes."""
    shelf, fd = Shelf(lambda: seals), memory_file(CONTENT)
    assert shelf.put(SLAB, fd, STEP, "d", Region(8, len(CONTENT) - 8))
    os.close(fd)
    listener = listen("127.0.0.1")
    server = PeerServer(listener, tls, shelf)
    server.start()
    yield int(listener.getsockname()[1])
    server.close()


def read(port: int, tls: TlsFiles, start: int = 0, size: int = 100, digest: str = "d") -> bytes:
    found, peer = bytearray(), TlsPeer("algo-2", "127.0.0.1", port, tls)
    try:
        peer.read(Wanted(STEP, digest, start, size), found.extend, time.monotonic() + 10)
    finally:
        peer.close()
    return bytes(found)


def test_a_node_of_this_job_gets_the_bytes(port, authority, tmp_path):
    other = make_tls(tmp_path / "other", authority)
    assert read(port, other) == CONTENT[8:108]
    assert read(port, other, 5, len(CONTENT) - 13) == CONTENT[13:]


def test_who_has_no_certificate_is_refused(port, tls):
    assert "CERTIFICATE_REQUIRED" in refusal(port, tls.ca, None)


@pytest.mark.parametrize(("whose", "alert"), [("foreign", "UNKNOWN_CA"), ("expired", "CERTIFICATE_EXPIRED")])
def test_who_has_a_foreign_or_an_expired_certificate_is_refused(whose, alert, port, authority, tls, tmp_path):
    if whose == "expired":
        other = make_tls(tmp_path / "other", authority, days=-1)
    else:
        other = make_tls(tmp_path / "other")
        other.ca.write_bytes(authority.certificate)  # it believes the listener, and is not believed
    assert alert in refusal(port, tls.ca, other)
    with pytest.raises(PeerAway):
        read(port, other)


def test_who_speaks_in_the_clear_is_refused(port):
    with socket.create_connection(("127.0.0.1", port), 10) as line:
        line.sendall(b'{"version": 1, "step": 7, "digest": "d", "start": 0, "size": 9}\n')
        with contextlib.suppress(ConnectionResetError):
            assert b"ok" not in line.recv(100)


def test_a_listener_of_another_authority_is_not_believed(port, tmp_path):
    with pytest.raises(PeerAway, match="certificate verify failed"):
        read(port, make_tls(tmp_path / "other"))


# --- what is given ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "digest"), [({}, "another"), ({SLAB: (STEP, 5)}, "d"), ({SLAB: (STEP + 1, 4)}, "d"), (None, "d")]
)
def test_what_is_not_sealed_so_any_more_is_not_given(change, digest, port, tls, seals):
    if change is None:
        seals.clear()
    seals.update(change or {})
    with pytest.raises(PeerLacks):
        read(port, tls, digest=digest)


def test_a_range_beyond_the_region_is_refused(port, tls):
    with pytest.raises(PeerAway, match="range"):
        read(port, tls, 0, len(CONTENT) - 7)


def test_a_slab_that_is_written_anew_while_it_is_read_ends_the_answer_short(tls):
    found = bytearray()
    with giving(tls, CONTENT, "d", fades_after=1 + PIECE_BYTES // GIVEN_BYTES) as port:
        peer = TlsPeer("algo-2", "127.0.0.1", port, tls)
        with pytest.raises(PeerAway, match="broke off"):
            peer.read(Wanted(STEP, "d", 0, len(CONTENT)), found.extend, time.monotonic() + 10)
        peer.close()
    assert found == CONTENT[:PIECE_BYTES]


def test_the_memory_of_a_slab_that_is_gone_is_let_go(seals):
    shelf, fd = Shelf(lambda: seals), memory_file(b"slab")
    try:
        assert shelf.put(SLAB, fd, STEP, "d", Region(0, 4)) and shelf.put(SLAB, fd, STEP, "d", Region(0, 4))
        shelf.prune()
        assert held(fd) == 2
        seals.clear()
        shelf.prune()
        assert held(fd) == 1
        assert not shelf.put(SLAB, fd, STEP, "d", Region(0, 4))
    finally:
        os.close(fd)


def test_more_connections_than_there_is_room_for_are_hung_up_on(port, tls):
    with contextlib.ExitStack() as held:
        for _ in range(CONNECTIONS_MAX):  # they say nothing
            held.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        with pytest.raises(PeerAway):
            read(port, tls)
    give_up = time.monotonic() + 30
    while True:  # once they are gone there is room again
        try:
            assert read(port, tls) == CONTENT[8:108]
            return
        except PeerAway:
            assert time.monotonic() < give_up


@pytest.mark.parametrize(
    "line", [b"no json\n", b"[]\n", b'{"version": 1}\n', b"x" * 600, b'{"version": 1, "step": -1}\n']
)
def test_nonsense_ends_the_connection_and_nothing_else(line, port, tls):
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.cert, tls.key)
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
            secured.sendall(line)
            assert secured.recv(100) == b""
    assert read(port, tls) == CONTENT[8:108]


def test_another_version_is_told_so(port, tls):
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.cert, tls.key)
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
            secured.sendall(b'{"version": 2}\n')
            assert json.loads(secured.recv(100)) == {"ok": False, "error": "version"}
