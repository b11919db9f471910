"""An agent in a thread: it owns the wire and the slabs, answers layouts, and grants the next slab after each seal."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
import time
from typing import Any

from keepstep_worker import wire as wires
from keepstep_worker.channel import Channel
from keepstep_worker.identity import Identity
from keepstep_worker.session import Session
from keepstep_worker.wire import Orders, Wire

DEADLINE_S = 60.0


class FakeAgent:
    """Outlives workers, as wire and slabs do; `connect` begins with a new one."""

    def __init__(self, slabs: int = 3, grants: bool = True) -> None:
        """Grant `slabs` slabs a layout in turn, or only what the test orders where `grants` is False."""
        self.wire_fd = Wire.create()
        self.wire = Wire(self.wire_fd)
        self.slabs: dict[int, int] = {}
        self.messages: list[dict[str, Any]] = []
        self.generation = 0
        self._wanted, self._grants = slabs, grants
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ours: socket.socket | None = None
        self._session: Session | None = None
        self._lock = threading.RLock()

    def connect(self, **orders: int) -> socket.socket:
        """Begin a generation with these orders; returns the worker's end of the socket."""
        self.hang_up()
        self.wire.reset_worker()
        self.generation += 1
        self.messages.clear()
        self.order(generation=self.generation, **{"hold": 0, "drain_step": 0, "grant": wires.NO_SLAB, **orders})
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve, args=(self._ours,))
        self._thread.start()
        return theirs

    def session(self, **orders: int) -> Session:
        """A worker of the next generation, in this process."""
        endpoint = self.connect(**orders)
        self._session = Session(Wire(self.wire_fd), Channel(endpoint), Identity(self.generation))
        return self._session

    def environment(self, endpoint: socket.socket, **more: str) -> dict[str, str]:
        """What a worker in a process of its own is given; its descriptors must be passed on."""
        named = {
            "WIRE_FD": self.wire_fd,
            "SOCKET_FD": endpoint.fileno(),
            "GENERATION": self.generation,
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
            "PARENT_PID": os.getpid(),
        }
        return {**{f"KEEPSTEP_{name}": str(value) for name, value in named.items()}, **more}

    def order(self, **fields: int) -> Orders:
        with self._lock:
            orders = wires.changed(self.wire.read_orders(), **fields)
            self.wire.write_orders(orders)
            return orders

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th message of a kind, of this generation."""
        with self._news:
            arrived = self._news.wait_for(lambda: len(self.of(kind)) >= count, DEADLINE_S)
            assert arrived, f"no {kind} message among {self.messages}"
            return self.of(kind)[count - 1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == kind]

    def hang_up(self) -> None:
        """End the dealings with the worker of this generation; wire and slabs stay."""
        if self._ours is not None and self._thread is not None:
            self._ours.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._ours.close()
        if self._session is not None:
            self._session.close()
        self._ours = self._thread = self._session = None

    def close(self) -> None:
        """Give everything back."""
        self.hang_up()
        self.wire.close()
        for fd in (self.wire_fd, *self.slabs.values()):
            os.close(fd)

    def settle(self) -> None:
        """Wait until the newest seal was answered with another grant."""
        seals = self.wire.read_seals()
        if self._grants and seals:
            eventually(lambda: self.wire.read_orders().grant != self.newest().slab)

    def file(self, slab: int) -> bytes:
        """The sealed slab as the uploader would read it."""
        seal = next(seal for seal in self.wire.read_seals() if seal.slab == slab)
        return os.pread(self.slabs[slab], seal.size_bytes, 0)

    def newest(self) -> wires.Seal:
        return max(self.wire.read_seals(), key=lambda seal: seal.sequence)

    def _serve(self, endpoint: socket.socket) -> None:
        while True:
            try:
                packet = endpoint.recv(65536)
            except ConnectionResetError:
                return
            if not packet:
                return
            self._answer(endpoint, json.loads(packet))

    def _answer(self, endpoint: socket.socket, message: dict[str, Any]) -> None:
        if message["kind"] == "hello":
            restore = self.wire.read_orders().restore_slab
            if restore != wires.NO_SLAB:
                self._hand(endpoint, [restore])
        elif message["kind"] == "layout":
            first = max(self.slabs, default=-1) + 1
            for slab in range(first, first + self._wanted):
                self.slabs[slab] = os.memfd_create(f"slab-{slab}")
                os.ftruncate(self.slabs[slab], message["bytes"])
            self._granted = list(range(first, first + self._wanted))
            if self._grants:
                self.order(grant=first)  # before the slabs are handed over, so that the first snapshot finds it
            self._hand(endpoint, self._granted, message["layout"])
        elif message["kind"] == "sealed" and self._grants:
            at = self._granted.index(message["slab"]) + 1
            self.order(grant=self._granted[at % len(self._granted)])
        with self._news:
            self.messages.append(message)
            self._news.notify_all()

    def _hand(self, endpoint: socket.socket, slabs: list[int], layout: int | None = None) -> None:
        message = {
            "kind": "slabs",
            "slabs": [{"slab": slab, "bytes": os.fstat(self.slabs[slab]).st_size} for slab in slabs],
        }
        if layout is not None:
            message["layout"] = layout
        rights = array.array("i", [self.slabs[slab] for slab in slabs])
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if slabs else []
        endpoint.sendmsg([json.dumps(message).encode()], beside)


def eventually(condition: Any) -> None:
    """Wait until something holds that another process or thread brings about."""
    deadline = time.monotonic() + DEADLINE_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never held"
        tick.wait(0.002)
