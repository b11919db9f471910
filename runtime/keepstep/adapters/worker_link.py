"""The agent's end of the line to this host's worker: the wire, the slabs, and the socket beside them.

What outlives agents (wire and slabs) is kept by init under `wire` and `slab:N`. Nothing is decided here.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.ports import Keeper, KeptDescriptor
from keepstep_worker import wire as wires
from keepstep_worker.wire import Orders, Progress, Seal, StepRecord, Wire

_MESSAGE_BYTES_MAX = 65536


@dataclass
class _Line:
    """One worker's socket."""

    worker_id: str
    endpoint: socket.socket
    handed: list[tuple[bytes, list[int]]] = field(default_factory=list)


@dataclass
class _Ring:
    """The ring of a rank that saves nothing, and how far it was read; `newest` is None before a record was."""

    wire: Wire
    newest: StepRecord | None = None

    def read(self) -> list[StepRecord]:
        """The newest record of the last call, and what has come since; without gaps."""
        found, lost = self.wire.read_since(0 if self.newest is None else self.newest.sequence)
        known = [] if self.newest is None or lost else [self.newest]
        self.newest = found[-1] if found else self.newest
        return [*known, *found]


class WorkerLink:
    """Wire and slabs of local rank 0, and the socket to the worker that runs."""

    def __init__(
        self,
        keeper: Keeper,
        kept: Mapping[str, KeptDescriptor],
        on_message: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Take over what was kept of an earlier agent, or begin anew (see `open`)."""
        self._keeper, self._kept, self._on_message = keeper, kept, on_message
        self._slabs: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._line: _Line | None = None
        self._orders = Orders()
        self._sampled = 0
        self._rings: dict[int, _Ring] = {}
        self._inquiries: dict[int, socket.socket] = {}
        self._asked = 0
        self.first_rank = -1
        """Of this host's ranks that mpirun has started; -1 where it has not."""
        self._wire_fd = -1
        self._wire: Wire | None = None

    async def open(self) -> None:
        """Have a wire: init's, or a new one that init keeps from now on."""
        if "wire" in self._kept:
            self._wire_fd = self._kept["wire"].fd
        else:
            self._wire_fd = Wire.create()
            await self._keeper.keep("wire", self._wire_fd)
        self._wire = Wire(self._wire_fd)
        for name, entry in self._kept.items():
            if name.startswith("slab:"):
                number = int(name.removeprefix("slab:"))
                self._slabs[number], self._sizes[number] = entry.fd, int(entry.meta["bytes"])

    @property
    def wire(self) -> Wire:
        assert self._wire is not None, "open() comes first"
        return self._wire

    @property
    def wire_fd(self) -> int:
        """The memory of the control page and ring."""
        return self._wire_fd

    @property
    def has_worker(self) -> bool:
        """Whether a worker may be writing to the control page."""
        return self._line is not None

    @property
    def slabs(self) -> Mapping[int, int]:
        """Sizes in bytes by slab number."""
        return dict(self._sizes)

    def descriptor(self, slab: int) -> int:
        """The slab's memory."""
        return self._slabs[slab]

    def seals(self) -> list[Seal]:
        """The valid seals of slabs that exist."""
        return [seal for seal in self.wire.read_seals() if seal.slab in self._slabs]

    def progress(self) -> Progress:
        """What the worker last published."""
        return self.wire.read_progress()

    def records(self) -> tuple[list[StepRecord], int]:
        """Step records since the last call, oldest first, and how many were overwritten unseen."""
        found, lost = self.wire.read_since(self._sampled)
        if found:
            self._sampled = found[-1].sequence
        return found, lost

    def records_of_others(self) -> dict[int, list[StepRecord]]:
        """By rank, of this host's ranks but the first: the newest step record of the last call, and those since."""
        read = {rank: ring.read() for rank, ring in self._rings.items()}
        return {rank: records for rank, records in read.items() if len(records) > 1}

    def progress_of_others(self) -> dict[int, Progress]:
        """By rank, of this host's ranks but the first: what it last published."""
        return {rank: ring.wire.read_progress() for rank, ring in self._rings.items()}

    async def is_ready(self, rank: int, timeout_s: float) -> bool | None:
        """Ask a rank, first or other, whether the gradients of its step are ready; no answer in time is a no.

        Returns:
            None where it does not know, or can not be asked.
        """
        return await self._ask(rank, wires.READY, timeout_s)

    async def has_written_stacks(self, rank: int, timeout_s: float) -> bool | None:
        """Have a rank, first or other, write its stacks to its file; no answer in time is a no.

        Returns:
            None where it can not, or can not be asked.
        """
        return await self._ask(rank, wires.STACKS, timeout_s)

    async def _ask(self, rank: int, what: str, timeout_s: float) -> bool | None:
        line = self._inquiries.get(rank)
        if line is None:
            return None
        self._asked += 1
        loop, number = asyncio.get_running_loop(), self._asked
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(line, f"{number} {what}".encode())
                while answer := await loop.sock_recv(line, wires.ANSWER_BYTES_MAX):
                    said = json.loads(answer)
                    if said["to"] == number:  # else it is late, and to an earlier question
                        return None if said["said"] is None else bool(said["said"])
        except TimeoutError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def pid_of(self, rank: int) -> int:
        """The process of one of this host's ranks."""
        ring = self._rings.get(rank)
        return (self.progress() if ring is None else ring.wire.read_progress()).pid

    # --- slabs -------------------------------------------------------------------------------------------------------

    async def allocate(self, slab: int, size_bytes: int) -> None:
        """Make a slab and touch its memory without mapping it, so that the first snapshot meets no page fault.

        Raises:
            OSError: there is not that much memory.
        """
        fd = os.memfd_create(f"keepstep-slab-{slab}", os.MFD_CLOEXEC)
        try:
            if size_bytes:
                await asyncio.to_thread(os.posix_fallocate, fd, 0, size_bytes)
        except OSError:
            os.close(fd)
            raise
        await self.adopt(slab, fd, size_bytes)

    async def adopt(self, slab: int, fd: int, size_bytes: int) -> None:
        """Count a descriptor among the slabs, and have init keep it."""
        self._slabs[slab], self._sizes[slab] = fd, size_bytes
        await self._keeper.keep(f"slab:{slab}", fd, {"bytes": size_bytes})

    async def drop(self, slab: int) -> None:
        """Give a slab's memory back; the worker's own mapping goes with the worker."""
        fd = self._slabs.pop(slab, None)
        self._sizes.pop(slab, None)
        if fd is not None:
            if any(seal.slab == slab for seal in self.wire.read_seals()):  # the slot may be another one's by now
                self.wire.clear_seal(slab)
            os.close(fd)
            await self._keeper.drop(f"slab:{slab}")

    def seal(self, slab: int, step: int, size_bytes: int, generation: int, now_ns: int) -> Seal:
        """Declare a slab sealed that was filled by the agent's own hands; no worker may run."""
        sequence = max((seal.sequence for seal in self.wire.read_seals()), default=0) + 1
        seal = Seal(slab, step, sequence, size_bytes, 0, generation, now_ns)
        self.wire.write_seal(seal)
        return seal

    def clear_seal(self, slab: int) -> None:
        self.wire.clear_seal(slab)

    def hand(self, worker_id: str, slabs: tuple[int, ...], layout: int | None = None) -> None:
        """Send slabs to the worker; with `layout`, as the answer to what it announced."""
        line = self._line
        if line is None or line.worker_id != worker_id:
            return
        message: dict[str, Any] = {
            "kind": "slabs",
            "slabs": [{"slab": slab, "bytes": self._sizes[slab]} for slab in slabs if slab in self._slabs],
        }
        if layout is not None:
            message["layout"] = layout
        self._send(line, message, [self._slabs[slab] for slab in slabs if slab in self._slabs])

    # --- one worker --------------------------------------------------------------------------------------------------

    def prepare(self, worker_id: str) -> tuple[tuple[int, int], dict[str, str], Callable[[], None]]:
        """Make ready for a worker that is about to start: forget the last one, open a socket.

        Returns:
            Descriptors to inherit; environment; and what to call once the process has them.
        """
        self.hang_up()
        self.wire.reset_worker()
        self._sampled, self.first_rank = 0, -1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._line = _Line(worker_id, ours)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive, self._line)
        fds = (self._wire_fd, theirs.fileno())
        environment = {"KEEPSTEP_WIRE_FD": str(fds[0]), "KEEPSTEP_SOCKET_FD": str(fds[1])}
        return fds, environment, theirs.close

    def order(self, **fields: int) -> None:
        """Publish orders, and wake a worker that waits for them."""
        self._orders = wires.changed(self._orders, **fields)
        self.wire.write_orders(self._orders)
        if self._line is not None:
            self._send(self._line, {"kind": "orders"}, [])

    def ask_for_profile(self, folder: str, steps: int, seconds: float) -> int:
        """Have the worker that runs profile so many of its next steps, or seconds of them, into a folder.

        Returns:
            The number that its answer will carry: a message of kind `profiled`, with an `error` that is empty if all
            is well.
        """
        number = self._orders.profile + 1
        if self._line is not None:
            wish = {"kind": "profile", "number": number, "folder": folder, "steps": steps, "seconds": seconds}
            self._send(self._line, wish, [])
        self.order(profile=number)
        return number

    def hang_up(self) -> None:
        """Close the socket: its worker is gone."""
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(line.endpoint.fileno())
                asyncio.get_running_loop().remove_writer(line.endpoint.fileno())
            line.endpoint.close()
        for ring in self._rings.values():
            ring.wire.close()
        self._rings.clear()
        for asked in self._inquiries.values():
            asked.close()
        self._inquiries.clear()

    def drain(self) -> None:
        """Take in what the worker had sent before it went."""
        if self._line is not None:
            self._receive(self._line)

    def _send(self, line: _Line, message: Mapping[str, object], fds: list[int]) -> None:
        line.handed.append((json.dumps(message, separators=(",", ":")).encode(), fds))
        self._flush(line)

    def _flush(self, line: _Line) -> None:
        loop = asyncio.get_running_loop()
        while line.handed:
            packet, fds = line.handed[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                line.endpoint.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                loop.add_writer(line.endpoint.fileno(), self._flush, line)
                return
            except OSError:  # the worker is gone; its exit is reported elsewhere
                line.handed.clear()
                break
            line.handed.pop(0)
        if line.endpoint.fileno() >= 0:
            loop.remove_writer(line.endpoint.fileno())

    def _receive(self, line: _Line) -> None:
        while line is self._line:
            try:
                packet, fds, *_ = socket.recv_fds(line.endpoint, _MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                with contextlib.suppress(ValueError, OSError):
                    asyncio.get_running_loop().remove_reader(line.endpoint.fileno())
                return
            message = _parsed(packet)
            if message.get("kind") == "ring":
                self._take_ring(message.get("rank"), fds)
            elif message.get("kind") == wires.INQUIRIES:
                self._take_inquiries(message.get("rank", self.first_rank), fds)
            elif message:
                self._on_message(line.worker_id, message)
            for fd in fds:
                os.close(fd)

    def _take_inquiries(self, rank: object, fds: list[int]) -> None:
        """A rank can be asked from now on."""
        if isinstance(rank, int) and rank not in self._inquiries and fds:
            self._inquiries[rank] = socket.socket(fileno=os.dup(fds[0]))
            self._inquiries[rank].setblocking(False)

    def _take_ring(self, rank: object, fds: list[int]) -> None:
        """A rank of this host has come; without a descriptor, the first one, whose ring is the wire's."""
        if isinstance(rank, int) and not fds:
            self.first_rank = rank
        elif isinstance(rank, int):
            with contextlib.suppress(wires.WireError):
                self._rings[rank] = _Ring(Wire(fds[0]))


def _parsed(packet: bytes) -> dict[str, Any]:
    """What a worker says; nothing where it is no message: a script may have got hold of the socket."""
    try:
        message = json.loads(packet)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
