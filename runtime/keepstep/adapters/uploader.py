"""The agent's end of the line to the uploader process, and the packets that cross it.

A packet is one message of an AF_UNIX SOCK_SEQPACKET pair: `J` and a JSON object, or `M` with the JSON in a memfd, which
comes last among the passed descriptors, where it would not fit into the socket's buffer. A command carries an `id`, and
the reply to it the same; replies come in any order.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from keepstep import kernel

INLINE_BYTES_MAX = 64 << 10
SPILLED_BYTES_MAX = 64 << 20
IN_FLIGHT_MAX = 256
DESCRIPTORS_MAX = 2


class UploaderGone(Exception):
    """The uploader's process ended before it answered: whether the command was carried out is not known."""

    retryable = True
    hint = "the uploader is started again and the command repeated; all of them may be"


class PacketError(Exception):
    """What came over the line is no packet; the other end is broken."""


def send_packet(line: socket.socket, message: Mapping[str, object], fd: int | None = None) -> None:
    """Send a message, and a descriptor with it, as one packet.

    Raises:
        OSError: the other end is gone; BlockingIOError where the line does not block and is full.
    """
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    passed = [] if fd is None else [fd]
    if len(data) <= INLINE_BYTES_MAX:
        _send(line, b"J" + data, passed)
        return
    spilled = os.memfd_create("keepstep-packet", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(spilled, 0, len(data))
        view, at = memoryview(data), 0
        while at < len(data):
            at += os.pwrite(spilled, view[at:], at)
        _send(line, b"M", [*passed, spilled])
    finally:
        os.close(spilled)


def receive_packet(line: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """Receive a packet: the message and the descriptor that came with it, which is the caller's now; None at the end.

    Raises:
        PacketError: it is no packet.
        OSError: the line is broken; BlockingIOError where it does not block and is empty.
    """
    ints = array.array("i")
    data, ancillary, flags, _ = line.recvmsg(
        INLINE_BYTES_MAX + 1, socket.CMSG_SPACE(DESCRIPTORS_MAX * ints.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            ints.frombytes(content[: len(content) - len(content) % ints.itemsize])
    passed = list(ints)
    try:
        if not data:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise PacketError("a packet was cut off")
        body = _read_spilled(passed.pop()) if data == b"M" and passed else data[1:]
        if data[:1] not in (b"J", b"M") or len(passed) > 1:
            raise PacketError("a packet of an unknown kind")
        message = json.loads(body)
        if not isinstance(message, dict):
            raise PacketError("a packet holds no object")
        return message, passed.pop() if passed else None
    except ValueError as error:
        raise PacketError(f"a packet holds no JSON: {error}") from error
    finally:
        for fd in passed:
            os.close(fd)


def _send(line: socket.socket, data: bytes, passed: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
    line.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def _read_spilled(fd: int) -> bytes:
    try:
        size = os.fstat(fd).st_size
        if size > SPILLED_BYTES_MAX:
            raise PacketError(f"a packet of {size} bytes")
        pieces, at = [], 0
        while at < size and (piece := os.pread(fd, size - at, at)):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


class UploaderClient:
    """Starts the uploader, sends it commands and says when it ended; may be started again after that."""

    def __init__(self, on_exit: Callable[[int], None] | None = None) -> None:
        """Args: on_exit: called in the loop with the exit status (negative: the signal), once for each process."""
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 1
        self._sending = asyncio.Lock()
        self._writable: asyncio.Future[None] | None = None
        self._ended: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self, python: str = "", environment: Mapping[str, str] | None = None) -> int:
        """Start the process and return its id. For the main thread only: the process dies with its parent thread.

        Args:
            python: the interpreter, where it is to be another than the agent's.
            environment: the process's whole environment; None passes on the agent's.

        Raises:
            RuntimeError: the one before is still running.
            OSError: it can not be started.
        """
        if self._ended is not None:
            await asyncio.shield(self._ended)
        if self._process is not None:
            raise RuntimeError("the uploader is running")
        command = (python,) if python else kernel.interpreter()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fd = theirs.fileno()
                self._process = subprocess.Popen(
                    [*command, "-m", "keepstep.app.uploader", "--socket-fd", str(fd), "--parent-pid", str(os.getpid())],
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    env=None if environment is None else dict(environment),
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self._line = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)
        return self._process.pid

    async def call(self, command: Mapping[str, object], fd: int | None = None) -> dict[str, Any]:
        """Send a command, with a slab's descriptor where it wants one, and return the reply. `id` is set here.

        The descriptor stays the caller's. To stop waiting cancel the call: the uploader carries the command out all the
        same, and its late reply is dropped.

        Raises:
            UploaderGone: there is no uploader, or it ended before it answered.
        """
        if self._line is None:
            raise UploaderGone("the uploader is not running")
        number, self._next_id = self._next_id, self._next_id + 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._send({**command, "id": number}, fd)
            return await answer
        finally:
            self._answers.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # where sending failed nobody else looks at it

    async def stop(self) -> None:
        """End the process, whatever it is doing, and wait until it is gone."""
        if self._line is not None:
            self._close()
        if self._ended is not None:
            await asyncio.shield(self._ended)

    async def _send(self, message: Mapping[str, object], fd: int | None) -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            while True:
                line = self._line
                if line is None:
                    raise UploaderGone("the uploader ended before it took the command")
                try:
                    send_packet(line, message, fd)
                    return
                except BlockingIOError:
                    pass
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise UploaderGone("the uploader ended before it took the command") from error
                self._writable = loop.create_future()
                loop.add_writer(line.fileno(), _wake, self._writable)
                try:
                    await self._writable
                finally:
                    if line.fileno() >= 0:
                        loop.remove_writer(line.fileno())

    def _receive(self) -> None:
        """Take in all replies that are there; at the end of the line the process is done for."""
        while self._line is not None:
            try:
                packet = receive_packet(self._line)
            except BlockingIOError:
                return
            except (PacketError, ConnectionResetError):
                packet = None
            if packet is None:
                self._close()
                return
            message, fd = packet
            if fd is not None:
                os.close(fd)
            answer = self._answers.get(message.get("id", 0))
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _close(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(line.fileno())
        loop.remove_writer(line.fileno())
        line.close()
        if self._writable is not None:
            _wake(self._writable)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UploaderGone("the uploader ended before it answered"))
        self._ended = loop.create_task(self._reap())

    async def _reap(self) -> int:
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        status = await asyncio.to_thread(process.wait)
        self._process = None
        if self._on_exit is not None:
            self._on_exit(status)
        return status


def _wake(writable: asyncio.Future[None]) -> None:
    if not writable.done():
        writable.set_result(None)
