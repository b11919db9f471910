"""A TCP proxy that can be cut, frozen and slowed: the network between an agent and what it talks to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any

_CHUNK_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class TcpProxy:
    """Listens on a free loopback port and forwards to `target`; its methods may be called from any thread.

    `cut`: connections are reset, new ones too, until `restore`. `freeze`: nothing passes, nothing is said (a
    partition), until `restore`. `strand`: what is connected now never hears anything again, new connections work.
    `delay`: every chunk waits. `accepted` counts connections.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.port = 0
        self.accepted = 0
        self._cut = False
        self._delay_s = 0.0
        self._epoch = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"proxy to {port}", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def cut(self) -> None:
        self._do(self._set_cut())

    def freeze(self) -> None:
        self._do(self._set_open(False))

    def restore(self) -> None:
        self._do(self._set_open(True))

    def strand(self) -> None:
        self._do(self._set_epoch(self._epoch + 1))

    def delay(self, seconds: float) -> None:
        self._do(self._set_delay(seconds))

    def _do(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reset_all()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    async def _set_cut(self) -> None:
        self._cut = True
        self._open.set()
        self._reset_all()

    async def _set_open(self, flowing: bool) -> None:
        self._cut = False
        if flowing:
            self._open.set()
        else:
            self._open.clear()

    async def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    async def _set_delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def _reset_all(self) -> None:
        for writer in tuple(self._writers):
            self._reset(writer)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._cut:
                await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._reset(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers.add(far_writer)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer))
                pumps.create_task(self._pump(far_reader, writer))
        except* OSError:
            pass
        finally:
            self._reset(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        epoch = self._epoch
        while data := await reader.read(_CHUNK_BYTES):
            await self._open.wait()
            if epoch != self._epoch:
                await self._stop.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            writer.write(data)
            await writer.drain()
        raise ConnectionAbortedError("one side has closed")
