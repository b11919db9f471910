"""The uploader's part in giving and taking between hosts: what is offered, to whom, who is asked, how fast."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import monotonic
from keepstep.adapters.peers import PeerServer, Region, Shelf, TlsPeer, connect
from keepstep.adapters.trials import answer_trial, try_line
from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.safetensors import read_layout
from keepstep.ports import PeerAway, TlsFiles
from keepstep_worker.wire import Wire, WireError

_CONNECT_S = 2.0
_TRY_S = 6.0
"""What one other host may take, whatever its line is like."""


class InvalidCommand(Exception):
    """The agent asked for something that does not exist."""


class Giving:
    """What this host gives to others, and the others as it asks them. Without `listen` it neither gives nor asks."""

    def __init__(self) -> None:
        self._wire: Wire | None = None
        self._tls: TlsFiles | None = None
        self._shelf = Shelf(self._seals)

    def perform(self, what: str, command: Mapping[str, Any], fd: int | None) -> dict[str, object]:
        """Carry out `seals`, `listen`, `offer` or `try`.

        Raises:
            InvalidCommand: a field is missing or of a wrong type.
            MalformedSlab: what is offered is no slab.
        """
        if what == "try":
            return {"links": [self._try(*each) for each in _entries(command)]}
        fd = wanted(fd)
        if what == "seals":
            try:
                self._wire = Wire(fd)
            except WireError as error:
                raise InvalidCommand(str(error)) from error
            return {}
        if what == "listen":
            if "ca" in command:
                self._tls = TlsFiles(*(Path(text(command, name)) for name in ("ca", "cert", "key")))
            PeerServer(socket.socket(fileno=os.dup(fd)), self._tls, self._shelf, answer_trial).start()
            return {}
        layout = read_layout(fd, number(command, "size_bytes"))
        region = Region(layout.head_bytes, layout.replicated_bytes)
        slab, step, digest = number(command, "slab"), number(command, "step"), text(command, "digest")
        return {"offered": self._shelf.put(slab, fd, step, digest, region)}

    def others(self, command: Mapping[str, Any]) -> list[TlsPeer]:
        """The hosts to ask, as the command names them."""
        named = _entries(command)
        return [] if self._tls is None else [TlsPeer(*each, self._tls) for each in named]

    @contextlib.contextmanager
    def exchange(self, command: Mapping[str, Any], fd: int, step: int, digest: str) -> Iterator[Exchange | None]:
        """Share the reading of a checkpoint with the hosts that the command names; None where it names none."""
        named, place = _entries(command, "group"), command.get("place", 0)
        if self._tls is None or not named:
            yield None
            return
        if type(place) is not int or not 0 <= place < len(named):
            raise InvalidCommand(f"place must be one among {len(named)}, not {place!r}")
        tls = self._tls
        peers = [None if at == place else TlsPeer(*each, tls) for at, each in enumerate(named)]
        coming, whole = self._shelf.share(fd, step, digest), False
        try:
            yield Exchange(peers, coming)
            whole = True
        finally:
            coming.close(whole=whole)
            for peer in peers:
                if peer is not None:
                    peer.close()

    def _try(self, host: str, address: str, port: int) -> dict[str, object]:
        """How one other host is reached; `error` says why it is not."""
        deadline = monotonic() + _TRY_S
        try:
            found = try_line(lambda: connect(address, port, self._tls, monotonic() + _CONNECT_S), deadline)
        except (OSError, ValueError, PeerAway) as error:
            late = isinstance(error, TimeoutError)
            return {"peer": host, "error": "no answer" if late else str(error)[:200] or type(error).__name__}
        return {"peer": host, **asdict(found)}

    def _seals(self) -> dict[int, tuple[int, int]]:
        seals = [] if self._wire is None else self._wire.read_seals()
        return {seal.slab: (seal.step, seal.sequence) for seal in seals}


def _entries(command: Mapping[str, Any], field: str = "peers") -> list[tuple[str, str, int]]:
    """Hosts with address and port, as the command names them."""
    try:
        return [(str(host), str(address), int(port)) for host, address, port in command.get(field, [])]
    except (TypeError, ValueError) as error:
        raise InvalidCommand(f"{field} must be a list of host, address and port") from error


def wanted(fd: int | None) -> int:
    """A descriptor that came with the command."""
    if fd is None:
        raise InvalidCommand("a descriptor is wanted")
    return fd


def number(command: Mapping[str, Any], field: str) -> int:
    """A field that holds a whole number."""
    value = command.get(field)
    if type(value) is not int or value < 0:
        raise InvalidCommand(f"{field} must be a whole number, not {value!r}")
    return value


def text(command: Mapping[str, Any], field: str) -> str:
    """A field that holds a string."""
    value = command.get(field)
    if not isinstance(value, str):
        raise InvalidCommand(f"{field} must be a string, not {value!r}")
    return value
