"""Shares of the replicated region from peers that hold them in memory, checked against the manifest like any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from keepstep.adapters.clock import monotonic
from keepstep.checkpoint.digests import combine_crc32c, crc32c
from keepstep.checkpoint.manifest import Manifest, StoredObject
from keepstep.checkpoint.streams import Streams, divide
from keepstep.ports import Peer, PeerAway, PeerLacks, Wanted

RANGE_BYTES_MIN, RANGE_BYTES_MAX = 4 << 20, 32 << 20
PATIENCE_S = 5.0
RATE_MIN_BYTES_PER_S = 8 << 20
"""A peer that takes longer than PATIENCE_S and this rate for a range is no better than the store."""

Write = Callable[[memoryview, int], None]


class Peers:
    """The hosts that are asked before the store. Whoever fails once is not asked again in this fetch."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = list(peers)
        self._lock = threading.Lock()
        self._out: set[str] = set()
        self._streams = Streams("peers", cores=2)  # to decrypt, and to write what is decrypted
        self.brought: dict[str, int] = {}
        """Bytes that are here and right, by host."""
        self.trouble: list[str] = []
        """What was wrong with whom; that somebody holds no such snapshot is not."""

    def bring(self, manifest: Manifest, share: StoredObject, write: Write) -> bool:
        """Have a share's bytes written; False where no peer could give them, and what was written is worth nothing.

        Args:
            write: puts bytes at their place within the share; called from several threads.
        """
        turn = share.rank % len(self._peers) if self._peers else 0
        for peer in self._peers[turn:] + self._peers[:turn]:
            if peer.name not in self._out and self._bring_from(peer, manifest, share, write):
                with self._lock:
                    self.brought[peer.name] = self.brought.get(peer.name, 0) + share.size_bytes
                return True
        return False

    def close(self) -> None:
        """Let go of threads and connections."""
        self._streams.close()
        for peer in self._peers:
            peer.close()

    def _bring_from(self, peer: Peer, manifest: Manifest, share: StoredObject, write: Write) -> bool:
        ranges = divide(share.size_bytes, RANGE_BYTES_MIN, RANGE_BYTES_MAX)
        crcs = self._streams.run([partial(self._range, peer, manifest, share, at, size, write) for at, size in ranges])
        if any(crc is None for crc in crcs):
            return False
        found = combine_crc32c((crc or 0, size) for crc, (_, size) in zip(crcs, ranges, strict=True))
        if f"{found:08x}" != share.crc32c:
            self._leave_out(peer, f"wrong bytes: CRC32C {found:08x}, {share.key} has {share.crc32c} by the manifest")
            return False
        return True

    def _range(
        self, peer: Peer, manifest: Manifest, share: StoredObject, at: int, size: int, write: Write
    ) -> int | None:
        """Fetch a range; its CRC32C, or None where it is not here."""
        if peer.name in self._out:
            return None
        crc, here, pace = 0, at, self._streams.pace()

        def take(piece: memoryview) -> None:
            nonlocal crc, here
            write(piece, here)
            crc, here = crc32c(piece, crc), here + len(piece)
            pace.moved(len(piece))

        deadline = monotonic() + PATIENCE_S + size / RATE_MIN_BYTES_PER_S
        try:
            peer.read(Wanted(manifest.step, manifest.digest, share.offset + at, size), take, deadline)
        except PeerLacks:
            self._leave_out(peer, "")
            return None
        except PeerAway as error:
            self._leave_out(peer, str(error))
            return None
        return crc

    def _leave_out(self, peer: Peer, why: str) -> None:
        with self._lock:
            if peer.name not in self._out and why:
                self.trouble.append(f"{peer.name}: {why}")
            self._out.add(peer.name)
