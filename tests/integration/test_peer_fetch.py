"""A checkpoint fetched from hosts that hold it: the same bytes as from the store, whatever some of these hosts do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.adapters.certificates import Authority, make_authority
from keepstep.adapters.peers import TlsPeer, listen
from keepstep.adapters.store_directory import DirectoryStore
from keepstep.adapters.uploader import UploaderClient
from keepstep.app.storing import Giving, Storing
from keepstep.checkpoint import peering
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.manifest import Manifest, build_manifest
from keepstep.checkpoint.peering import Peers
from keepstep.checkpoint.restore import fetch
from keepstep.checkpoint.upload import UploadOrder, upload
from keepstep.core.policy import Policy
from keepstep.ports import PeerAway, PeerLacks, TlsFiles, Wanted
from keepstep_worker.wire import Seal, Wire
from tests.support.etcd import make_tls
from tests.support.giving import SLAB, STEP, giving
from tests.support.slabs import file_bytes
from tests.support.uploading import RUNTIME, WEIGHTS, checkpoint, content_of, good, slab, started

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("job", time.time())


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> TlsFiles:
    return make_tls(tmp_path / "tls", authority)


def drop_replicated(root: Path) -> int:
    """Take what all hosts hold alike out of a directory store."""
    gone = [path for path in root.rglob("replicated-*") if path.is_file()]
    for path in gone:
        path.unlink()
    return len(gone)


# --- real uploaders --------------------------------------------------------------------------------------------------


class Host:
    """An uploader that listens, and the control page beside it."""

    def __init__(self, client: UploaderClient, tls: TlsFiles) -> None:
        self._client, self._tls = client, tls
        self._listener = listen("127.0.0.1")
        self._wire_fd = Wire.create()
        self.wire = Wire(self._wire_fd)

    async def begin(self) -> None:
        files = {name: str(getattr(self._tls, name)) for name in ("ca", "cert", "key")}
        await good(self._client, self._wire_fd, command="seals")
        await good(self._client, self._listener.fileno(), command="listen", **files)

    @property
    def peer(self) -> tuple[str, str, int]:
        return "algo-1", "127.0.0.1", int(self._listener.getsockname()[1])

    async def hold(self, content: bytes) -> bool:
        """Hold a snapshot as after `verify`; whether it is offered."""
        size = len(content)
        self.wire.write_seal(Seal(SLAB, STEP, 1, size, 0, 1, 0))
        with slab(content) as fd:
            verified = await good(self._client, fd, command="verify", slab=SLAB, step=STEP, size_bytes=size)
            digest = verified["replicated"]
            reply = await good(self._client, fd, command="offer", slab=SLAB, step=STEP, digest=digest, size_bytes=size)
        return bool(reply["offered"])

    def close(self) -> None:
        self._listener.close()
        self.wire.close()
        os.close(self._wire_fd)


def test_a_newcomer_gets_the_state_from_the_memory_of_another_host(tls, tmp_path):
    async def run() -> None:
        place = {"store": str(tmp_path / "store")}
        async with started(**place) as first, started(**place) as second:
            manifest, _ = await checkpoint(first, STEP)
            holder, newcomer = Host(first, tls), Host(second, tls)
            with contextlib.closing(holder), contextlib.closing(newcomer):
                await holder.begin()
                await newcomer.begin()
                assert await holder.hold(content_of(0))
                assert drop_replicated(tmp_path / "store") == 2
                command = {"command": "fetch", "manifest": manifest, "rank": 1, "world": 2, "peers": [holder.peer]}
                with slab(b"") as fd:
                    reply = await good(second, fd, **command)
                    assert file_bytes(fd) == content_of(1)
                assert (reply["brought"], reply["trouble"]) == ({"algo-1": len(WEIGHTS)}, [])

                holder.wire.clear_seal(SLAB)  # the worker goes on, and writes there
                with slab(b"") as fd:
                    reply = await asyncio.wait_for(second.call(command, fd), 60)
                assert (reply["ok"], reply["error"]) == (False, "missing"), "what the store lacks nobody holds any more"

    asyncio.run(run())


def test_a_slab_that_is_not_sealed_with_that_step_is_not_offered(tls, tmp_path):
    async def run() -> None:
        async with started(store=str(tmp_path / "store")) as client:
            host, content = Host(client, tls), content_of(0)
            with contextlib.closing(host), slab(content) as fd:
                await host.begin()
                command = {"command": "offer", "slab": SLAB, "step": STEP, "digest": "d", "size_bytes": len(content)}
                assert await good(client, fd, **command) == {"id": 4, "ok": True, "offered": False}

    asyncio.run(run())


def test_an_uploader_without_certificates_asks_nobody(tmp_path):
    async def run() -> None:
        async with started(store=str(tmp_path / "store")) as client:
            manifest, _ = await checkpoint(client, STEP)
            peers = [("algo-1", "127.0.0.1", 1)]
            with slab(b"") as fd:
                reply = await good(client, fd, command="fetch", manifest=manifest, rank=1, world=2, peers=peers)
                assert file_bytes(fd) == content_of(1)
            assert (reply["brought"], reply["trouble"]) == ({}, [])

    asyncio.run(run())


def lets_in(port: int, tls: TlsFiles) -> bool:
    """Whether a listener answers at all, if only that it holds nothing."""
    peer = TlsPeer("algo-1", "127.0.0.1", port, tls)
    try:
        peer.read(Wanted(STEP, "d", 0, 1), lambda piece: None, time.monotonic() + 5)
    except PeerLacks:
        return True
    except PeerAway:
        return False
    finally:
        peer.close()
    raise AssertionError("nothing was offered")


def test_an_uploader_that_is_started_again_listens_at_the_same_port(tls, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", RUNTIME)

    async def until_it_listens(port: int, pid: int | None) -> int:
        give_up = time.monotonic() + 60
        while storing.pid in (pid, None) or not await asyncio.to_thread(lets_in, port, tls):
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)
        assert storing.pid is not None
        return storing.pid

    async def run() -> None:
        wire_fd, listener = Wire.create(), listen("127.0.0.1")
        storing.give(Giving(listener, tls), wire_fd)
        running = asyncio.create_task(storing.run())
        try:
            port = int(listener.getsockname()[1])
            first = await until_it_listens(port, None)
            os.kill(first, signal.SIGKILL)
            await until_it_listens(port, first)
        finally:
            running.cancel()
            await storing.close()
            os.close(wire_fd)

    storing = Storing("job", str(tmp_path / "store"), Policy(), lambda event: None, lambda text: None)
    asyncio.run(run())


# --- peers that fail -------------------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path: Path) -> tuple[DirectoryStore, Manifest]:
    """A checkpoint of two ranks in a directory."""
    store, name, objects, digest = DirectoryStore(tmp_path / "store"), ManifestName(1, STEP, "run"), [], ""
    for rank in range(2):
        with slab(content_of(rank)) as fd:
            done = upload(store, fd, UploadOrder("job", name, rank, 2, len(content_of(rank))))
        objects += done.objects
        digest = done.replicated
    manifest = build_manifest("job", name, 2, digest, objects, 0)
    commit(store, manifest)
    return store, manifest


def fetched(committed: tuple[DirectoryStore, Manifest], tls: TlsFiles, *ports: int) -> Peers:
    """Fetch rank 1's slab with hosts algo-1, algo-2, ... at these ports to ask; what came of them."""
    store, manifest = committed
    peers = Peers([TlsPeer(f"algo-{n}", "127.0.0.1", port, tls) for n, port in enumerate(ports, 1)])
    try:
        with slab(b"") as fd:
            found = fetch(store, manifest, 1, fd, peers)
            assert file_bytes(fd) == content_of(1)
        assert found.replicated == manifest.digest
    finally:
        peers.close()
    return peers


@contextlib.contextmanager
def mute(tls: TlsFiles) -> Iterator[int]:
    """A listener that lets everybody in and answers nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    held: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                held.append(context.wrap_socket(line, server_side=True))

    with listen("127.0.0.1") as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            for line in held:
                line.close()


FLIPPED = bytes([*WEIGHTS[:-1], WEIGHTS[-1] ^ 16])


@pytest.mark.parametrize("then", ["a peer", "the store"])
def test_a_peer_that_lies_is_named_and_the_bytes_are_had_elsewhere(then, committed, tls, tmp_path):
    digest = committed[1].digest
    with giving(tls, FLIPPED, digest) as liar, giving(tls, WEIGHTS, digest) as honest:
        if then == "a peer":
            drop_replicated(tmp_path / "store")
        peers = fetched(committed, tls, *([honest, liar] if then == "a peer" else [liar]))
    (trouble,) = peers.trouble
    assert trouble.startswith("algo-2: wrong bytes" if then == "a peer" else "algo-1: wrong bytes")
    assert "replicated-1-of-2" in trouble, "the bit is in the second share"
    if then == "a peer":
        assert sum(peers.brought.values()) == len(WEIGHTS)


@pytest.mark.parametrize("then", ["a peer", "the store"])
def test_a_peer_that_dies_in_mid_transfer_does_not_end_the_fetch(then, committed, tls, tmp_path):
    digest = committed[1].digest
    with giving(tls, WEIGHTS, digest, fades_after=2) as dies, giving(tls, WEIGHTS, digest) as lives:
        if then == "a peer":
            drop_replicated(tmp_path / "store")
        peers = fetched(committed, tls, *([dies, lives] if then == "a peer" else [dies]))
    assert peers.brought == ({"algo-2": len(WEIGHTS)} if then == "a peer" else {})


def test_a_peer_that_is_too_slow_is_given_up(committed, tls, monkeypatch):
    monkeypatch.setattr(peering, "PATIENCE_S", 0.2)
    with mute(tls) as slow:
        peers = fetched(committed, tls, slow)
    assert (peers.brought, peers.trouble) == ({}, ["algo-1: it is too slow"])


def test_a_peer_that_is_not_there_and_one_that_lacks_it_do_no_harm(committed, tls, tmp_path):
    with socket.socket() as nobody, giving(tls, WEIGHTS, "another") as lacks:
        nobody.bind(("127.0.0.1", 0))
        with giving(tls, WEIGHTS, committed[1].digest) as holds:
            drop_replicated(tmp_path / "store")
            peers = fetched(committed, tls, int(nobody.getsockname()[1]), lacks, holds)
    assert peers.brought == {"algo-3": len(WEIGHTS)}
    assert len(peers.trouble) == 1 and peers.trouble[0].startswith("algo-1: ")


def test_a_peer_of_another_job_is_not_believed(committed, tls, tmp_path):
    with giving(make_tls(tmp_path / "other"), WEIGHTS, committed[1].digest) as stranger:
        peers = fetched(committed, tls, stranger)
    assert peers.brought == {}
    assert len(peers.trouble) == 1 and "certificate verify failed" in peers.trouble[0]


def test_a_large_share_is_read_in_ranges_side_by_side(committed, tls, tmp_path, monkeypatch):
    monkeypatch.setattr(peering, "RANGE_BYTES_MIN", 100_000)
    monkeypatch.setattr(peering, "RANGE_BYTES_MAX", 100_000)
    with giving(tls, WEIGHTS, committed[1].digest) as holds:
        drop_replicated(tmp_path / "store")
        assert fetched(committed, tls, holds).brought == {"algo-1": len(WEIGHTS)}
