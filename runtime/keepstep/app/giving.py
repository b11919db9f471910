"""The uploader's part in giving and taking between hosts: what is offered, to whom, and who is asked."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.adapters.peers import PeerServer, Region, Shelf, TlsPeer
from keepstep.checkpoint.safetensors import read_layout
from keepstep.ports import TlsFiles
from keepstep_worker.wire import Wire, WireError


class InvalidCommand(Exception):
    """The agent asked for something that does not exist."""


class Giving:
    """What this host gives to others, and the others as it asks them. Without `listen` it neither gives nor asks."""

    def __init__(self) -> None:
        self._wire: Wire | None = None
        self._tls: TlsFiles | None = None
        self._shelf = Shelf(self._seals)

    def perform(self, what: str, command: Mapping[str, Any], fd: int) -> dict[str, object]:
        """Carry out `seals`, `listen` or `offer`.

        Raises:
            InvalidCommand: a field is missing or of a wrong type.
            MalformedSlab: what is offered is no slab.
        """
        if what == "seals":
            try:
                self._wire = Wire(fd)
            except WireError as error:
                raise InvalidCommand(str(error)) from error
            return {}
        if what == "listen":
            self._tls = TlsFiles(*(Path(text(command, name)) for name in ("ca", "cert", "key")))
            PeerServer(socket.socket(fileno=os.dup(fd)), self._tls, self._shelf).start()
            return {}
        layout = read_layout(fd, number(command, "size_bytes"))
        region = Region(layout.head_bytes, layout.replicated_bytes)
        slab, step, digest = number(command, "slab"), number(command, "step"), text(command, "digest")
        return {"offered": self._shelf.put(slab, fd, step, digest, region)}

    def others(self, command: Mapping[str, Any]) -> list[TlsPeer]:
        """The hosts to ask, as the command names them."""
        entries = command.get("peers", [])
        try:
            named = [(str(host), str(address), int(port)) for host, address, port in entries]
        except (TypeError, ValueError) as error:
            raise InvalidCommand("peers must be a list of host, address and port") from error
        return [] if self._tls is None else [TlsPeer(*each, self._tls) for each in named]

    def _seals(self) -> dict[int, tuple[int, int]]:
        seals = [] if self._wire is None else self._wire.read_seals()
        return {seal.slab: (seal.step, seal.sequence) for seal in seals}


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
