"""A checkpoint that no host holds: each host of a group reads a part of it from the store, and has the rest from them.

So the store gives a group each byte once, however many hosts it has. Whoever does not get a part from the host that is
to read it reads it from the store as well; and what is here in the end is checked against the manifest like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from keepstep.adapters.clock import monotonic
from keepstep.checkpoint.digests import combine_crc32c, crc32c
from keepstep.checkpoint.manifest import Manifest, StoredObject
from keepstep.checkpoint.peering import PATIENCE_S, RATE_MIN_BYTES_PER_S
from keepstep.checkpoint.receiving import Ranges, at_last
from keepstep.core.values import frozen
from keepstep.ports import Peer, PeerAway, PeerLacks, Sharing, Wanted

BYTES_MIN = 32 << 20
"""Less is read by each host from the store: to wait for others takes as long."""
_BEGIN_S = 10.0
"""How much later than this host another one may begin with its part."""

Write = Callable[[StoredObject, bytes | memoryview, int], None]
"""Takes bytes of a share, and where in it they lie; called from several threads."""


@frozen
class Part:
    """A range of a share, and the place in the group of the host that reads it from the store."""

    share: StoredObject
    at: int
    size_bytes: int
    place: int


def divide_among(shares: Sequence[StoredObject], count: int) -> list[Part]:
    """The parts of all shares, whole shares where there are enough of them; the same on all hosts."""
    pieces = -(-count // max(1, len(shares)))
    found: list[Part] = []
    for share in shares:
        length = max(1, -(-share.size_bytes // pieces))
        for at in range(0, share.size_bytes, length):
            found.append(Part(share, at, min(length, share.size_bytes - at), len(found) % count))
    return found


class Exchange:
    """One host's side of it."""

    def __init__(self, peers: Sequence[Peer | None], sharing: Sharing) -> None:
        """Begin with nothing.

        Args:
            peers: the hosts of the group, in the order that all of them know; None in this host's own place.
            sharing: by which the others have what has come here.
        """
        self._peers, self.sharing = list(peers), sharing
        self._lock = threading.Lock()
        self.brought: dict[str, int] = {}
        """Bytes that are here, by host."""
        self.trouble: list[str] = []
        """What was wrong with whom."""

    def bring(
        self, manifest: Manifest, shares: Sequence[StoredObject], ranges: Ranges, write: Write
    ) -> list[StoredObject]:
        """Have the bytes of shares written; returns those that did not become right.

        Raises:
            CorruptObject, StoreError: as the store has it.
        """
        parts = [part for part in divide_among(manifest.replicated(), len(self._peers)) if part.share in shares]
        own = self._peers.index(None)
        parts.sort(key=lambda part: (part.place - own) % len(self._peers))  # the own ones first: others wait for them

        def have(part: Part) -> int:
            crc = self._have_from_peer(manifest, part, write)
            return self._read(part, ranges, write) if crc is None else crc

        with ThreadPoolExecutor(len(self._peers), thread_name_prefix="exchange") as threads:
            crcs = dict(zip(parts, threads.map(have, parts), strict=True))
        return [share for share in shares if not self._is_right(share, crcs)]

    def _is_right(self, share: StoredObject, crcs: dict[Part, int]) -> bool:
        own = sorted((part for part in crcs if part.share == share), key=lambda part: part.at)
        found = combine_crc32c((crcs[part], part.size_bytes) for part in own)
        if f"{found:08x}" == share.crc32c:
            return True
        self._tell(f"{share.key}: CRC32C {found:08x} of what the group has read, the manifest says {share.crc32c}")
        return False

    def _read(self, part: Part, ranges: Ranges, write: Write) -> int:
        """Read a part from the store; what is a whole share is right before others have it."""
        share, crc = part.share, 0

        def place(piece: bytes, at: int) -> None:
            write(share, piece, at)

        def read() -> None:
            nonlocal crc
            crc = ranges.receive_part(share, part.at, part.size_bytes, place)

        if part.size_bytes == share.size_bytes:
            at_last(lambda: ranges.receive(share, place))
            crc = int(share.crc32c, 16)
        else:
            at_last(read)
        self.sharing.has(share.offset + part.at, part.size_bytes)
        return crc

    def _have_from_peer(self, manifest: Manifest, part: Part, write: Write) -> int | None:
        peer = self._peers[part.place]
        if peer is None:
            return None
        crc, here = 0, part.at

        def take(piece: memoryview) -> None:
            nonlocal crc, here
            write(part.share, piece, here)
            crc, here = crc32c(piece, crc), here + len(piece)

        wait_s = _BEGIN_S + part.size_bytes / RATE_MIN_BYTES_PER_S
        deadline = monotonic() + wait_s + PATIENCE_S + part.size_bytes / RATE_MIN_BYTES_PER_S
        wanted = Wanted(manifest.step, manifest.digest, part.share.offset + part.at, part.size_bytes, wait_s)
        try:
            peer.read(wanted, take, deadline)
        except (PeerLacks, PeerAway) as error:
            self._tell(f"{peer.name}: {error}")
            return None
        with self._lock:
            self.brought[peer.name] = self.brought.get(peer.name, 0) + part.size_bytes
        return crc

    def _tell(self, what: str) -> None:
        with self._lock:
            self.trouble.append(what)
