"""A checkpoint that no host holds is read from the store once for all, and right on each, whatever some of them do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from keepstep.adapters.certificates import make_authority
from keepstep.adapters.peers import PeerServer, Shelf, TlsPeer, listen
from keepstep.adapters.store_directory import DirectoryStore
from keepstep.checkpoint import exchange as exchanges
from keepstep.checkpoint import restore
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.exchange import Exchange, divide_among
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.manifest import Manifest, StoredObject, build_manifest
from keepstep.checkpoint.restore import fetch
from keepstep.checkpoint.upload import UploadOrder, upload
from keepstep.ports import TlsFiles
from tests.support.etcd import make_tls
from tests.support.slabs import file_bytes, held
from tests.support.uploading import WEIGHTS, content_of, slab

pytestmark = pytest.mark.integration
STEP = 7


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls(tmp_path_factory.mktemp("tls"), make_authority("job", time.time()))


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(restore, "BYTES_MIN", 1)


class Counted(DirectoryStore):
    """Counts what is read of the replicated objects; `spoil` makes a bit of the first one wrong, so often."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lock, self.read_bytes, self.spoil = threading.Lock(), 0, 0

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        for piece in super().get(key, start, size):
            if "replicated" in key:
                with self.lock:
                    self.read_bytes += len(piece)
                    spoils, self.spoil = self.spoil > 0, self.spoil - 1
                if spoils:
                    piece = bytes([piece[0] ^ 1]) + piece[1:]
            yield piece


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "store")


@pytest.fixture
def manifest(store: Counted) -> Manifest:
    """A checkpoint of two ranks."""
    name, objects, digest = ManifestName(1, STEP, "run"), [], ""
    for rank in range(2):
        with slab(content_of(rank)) as fd:
            done = upload(store, fd, UploadOrder("job", name, rank, 2, len(content_of(rank))))
        objects += done.objects
        digest = done.replicated
    made = build_manifest("job", name, 2, digest, objects, 0)
    commit(store, made)
    return made


class Group:
    """Hosts that fetch at the same time, each in a thread; those in `without` never come."""

    def __init__(self, count: int, tls: TlsFiles) -> None:
        self.tls, self.listeners = tls, [listen("127.0.0.1") for _ in range(count)]
        self.ports = [int(listener.getsockname()[1]) for listener in self.listeners]
        self.shelves = [Shelf(dict) for _ in range(count)]
        self.servers = [
            PeerServer(listener, tls, shelf) for listener, shelf in zip(self.listeners, self.shelves, strict=True)
        ]
        self.exchanges: dict[int, Exchange] = {}

    def fetch(self, store: Counted, manifest: Manifest, place: int) -> bytes:
        """What the host at this place has in the end."""
        peers = [
            None if at == place else TlsPeer(f"algo-{at + 1}", "127.0.0.1", port, self.tls)
            for at, port in enumerate(self.ports)
        ]
        with slab(b"") as fd:
            coming, whole = self.shelves[place].share(fd, STEP, manifest.digest), False
            self.exchanges[place] = Exchange(peers, coming)
            try:
                found = fetch(store, manifest, place, fd, None, self.exchanges[place])
                whole = True
            finally:
                coming.close(whole=whole)
                for peer in peers:
                    if peer is not None:
                        peer.close()
            assert found.replicated == manifest.digest
            return file_bytes(fd)

    def fetch_all(self, store: Counted, manifest: Manifest, without: tuple[int, ...] = ()) -> None:
        """All of them end with what the manifest says."""
        places = [place for place in range(len(self.listeners)) if place not in without]
        for place in range(len(self.listeners)):
            if place in without:
                self.listeners[place].close()
            else:
                self.servers[place].start()
        with ThreadPoolExecutor(len(places)) as threads:
            found = list(threads.map(lambda place: self.fetch(store, manifest, place), places))
        for place, content in zip(places, found, strict=True):
            if place < manifest.world_size:
                assert content == content_of(place)
            else:
                assert WEIGHTS in content

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def group(tls: TlsFiles) -> Iterator[contextlib.AbstractContextManager[Group]]:
    made: list[Group] = []

    def of(count: int) -> Group:
        made.append(Group(count, tls))
        return made[-1]

    yield of
    for each in made:
        each.close()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_byte_is_read_from_the_store_once(count, group, store, manifest):
    hosts = group(count)
    hosts.fetch_all(store, manifest)
    assert store.read_bytes == len(WEIGHTS)
    for place, each in hosts.exchanges.items():
        own = sum(part.size_bytes for part in divide_among(manifest.replicated(), count) if part.place == place)
        assert sum(each.brought.values()) == len(WEIGHTS) - own
        assert each.trouble == []


def test_the_part_of_a_host_that_is_not_there_is_read_by_the_others(group, store, manifest):
    hosts = group(3)
    hosts.fetch_all(store, manifest, without=(1,))
    assert len(WEIGHTS) < store.read_bytes < 2 * len(WEIGHTS)
    assert all("algo-2: " in trouble for each in hosts.exchanges.values() for trouble in each.trouble)


def test_a_host_that_does_not_begin_in_time_is_not_waited_for(group, store, manifest, monkeypatch):
    monkeypatch.setattr(exchanges, "_BEGIN_S", 1.0)
    hosts = group(2)
    for server in hosts.servers:
        server.start()
    assert hosts.fetch(store, manifest, 0) == content_of(0)
    assert store.read_bytes == len(WEIGHTS)
    assert "does not hold step 7" in hosts.exchanges[0].trouble[0]
    assert hosts.fetch(store, manifest, 1) == content_of(1)
    assert hosts.exchanges[1].brought == {"algo-1": manifest.replicated()[0].size_bytes}, "it is given away still"


@pytest.mark.parametrize("count", [2, 3])
def test_a_bit_that_is_wrong_on_its_way_is_found_wherever_it_goes(count, group, store, manifest):
    hosts = group(count)
    store.spoil = 1
    hosts.fetch_all(store, manifest)
    assert store.read_bytes > len(WEIGHTS)


def test_a_sealed_slab_takes_the_place_of_what_was_coming(tmp_path):
    seals = {1: (STEP, 4)}
    shelf = Shelf(lambda: seals)
    with slab(content_of(0)) as fd:
        coming = shelf.share(fd, STEP, "d")
        coming.close(whole=True)
        from keepstep.adapters.peers import Region

        assert shelf.put(1, fd, STEP, "d", Region(0, 10))
        seals.clear()
        shelf.prune()
        assert held(fd) == 1


def share(number: int, size: int) -> StoredObject:
    return StoredObject(f"share-{number}", "replicated", number, 0, size, "00000000")


@pytest.mark.parametrize(("shares", "count"), [(1, 2), (2, 2), (2, 3), (3, 8), (8, 8), (8, 3), (1, 8)])
def test_parts_make_up_all_shares_and_each_host_has_about_as_much(shares, count):
    all_shares = [share(number, 1000 + number) for number in range(shares)]
    parts = divide_among(all_shares, count)
    for each in all_shares:
        own = sorted((part.at, part.size_bytes) for part in parts if part.share == each)
        assert own[0][0] == 0 and sum(size for _, size in own) == each.size_bytes
        assert all(at + size == behind for (at, size), (behind, _) in pairwise(own))
    load = [sum(part.size_bytes for part in parts if part.place == place) for place in range(count)]
    assert min(load) > 0
    if shares <= count:
        assert max(load) <= 2 * sum(load) / count + shares
