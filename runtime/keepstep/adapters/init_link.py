"""The agent's end of the line to init: what has to outlive the agent, and what init must do when it can not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from keepstep import init, kernel
from keepstep.core.values import frozen

ANSWER_S = 10.0
"""How long init may take to start a companion: it forks, and answers at once."""


class InitLinkError(Exception):
    """This process was not started by init, or init is gone."""


@frozen
class Kept:
    """A descriptor that an earlier agent had init keep."""

    fd: int
    meta: Mapping[str, Any]


@frozen
class InitState:
    """What was there before this agent.

    Attributes:
        boot: how often the agent was started again on this host.
        kept: descriptors by name; they belong to this process, and init holds its own.
        memo: the last memo.
        companions: pids of the running companions, by name.
        signals: signals that asked an earlier agent to stop, in the order of their arrival.
    """

    boot: int = 0
    kept: Mapping[str, Kept] = field(default_factory=dict)
    memo: Mapping[str, Any] = field(default_factory=dict)
    companions: Mapping[str, int] = field(default_factory=dict)
    signals: tuple[int, ...] = ()


def parse_state(text: str) -> InitState:
    """Read what init put into the environment.

    Raises:
        InitLinkError: it is not what init writes.
    """
    try:
        raw = json.loads(text)
        kept = {str(name): Kept(int(entry["fd"]), dict(entry["meta"])) for name, entry in raw["kept"].items()}
        companions = {str(name): int(pid) for name, pid in raw["companions"].items()}
        return InitState(int(raw["boot"]), kept, dict(raw["memo"]), companions, tuple(map(int, raw["signals"])))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InitLinkError(f"{init.ENV_STATE} is not understood: {error!r}") from error


class InitLink:
    """One agent's line to init. Every method but the constructors belongs to the event loop's thread.

    What is sent has left this process when the call returns, and init obeys it even if the agent dies right after.
    """

    def __init__(self, connection: socket.socket, state: InitState) -> None:
        self.state = state
        self._packets = kernel.PacketLink(connection)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._companions: dict[str, asyncio.Future[int]] = {}
        self._on_fenced: Callable[[], None] = _nothing
        self._on_companion_exited: Callable[[str, int], None] = _nothing

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> InitLink:
        """Take over the socket and descriptors that init passed on; workers will not inherit them.

        Raises:
            InitLinkError: there is no init above this process.
        """
        if init.ENV_FD not in environ:
            raise InitLinkError(f"{init.ENV_FD} is not set: the agent is started by keepstep.init alone")
        state = parse_state(environ.get(init.ENV_STATE, ""))
        try:
            number = int(environ[init.ENV_FD])
            for fd in (number, *(kept.fd for kept in state.kept.values())):
                os.set_inheritable(fd, False)
            return cls(socket.socket(fileno=number), state)
        except (ValueError, OSError) as error:
            raise InitLinkError(f"what init passed on can not be used: {error}") from error

    def listen(self, *, on_fenced: Callable[[], None], on_companion_exited: Callable[[str, int], None]) -> None:
        """Begin to take in what init says; call it once, in the running loop.

        Args:
            on_fenced: the lease deadline passed, and init has killed the workers.
            on_companion_exited: name, and exit code or minus the signal.
        """
        self._on_fenced, self._on_companion_exited = on_fenced, on_companion_exited
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._packets.fd, self._read)

    def listen_signals(self, on_signal: Callable[[int], None]) -> None:
        """Have the forwarded signals call `on_signal` in the loop, beginning with what asked an earlier agent to stop.

        Until then they are blocked in this process, so none is lost. Call it once, on the main thread.
        """
        loop = asyncio.get_running_loop()
        for number in init.FORWARDED:
            loop.add_signal_handler(number, on_signal, int(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, init.FORWARDED)
        for earlier in self.state.signals:
            loop.call_soon(on_signal, earlier)

    async def keep(self, name: str, fd: int, meta: Mapping[str, Any] | None = None) -> None:
        """Have init hold a descriptor and hand it to the next agent; the caller's own stays the caller's.

        Raises:
            ValueError: the name and meta are longer than init remembers.
        """
        described = dict(meta or {})
        if len(json.dumps([name, described])) > init.META_BYTES_MAX:
            raise ValueError(f"what is kept as {name!r} is described in more than {init.META_BYTES_MAX} bytes")
        await self._send({"keep": name, "meta": described}, fd)

    async def drop(self, name: str) -> None:
        """Have init close a kept descriptor."""
        await self._send({"drop": name})

    async def group(self, pgid: int) -> None:
        """Have init kill this process group when the agent dies or the lease deadline passes."""
        await self._send({"group": pgid})

    async def ungroup(self, pgid: int) -> None:
        """Take a process group back that is gone."""
        await self._send({"ungroup": pgid})

    async def deadline(self, monotonic_s: float | None) -> None:
        """Set when the lease ends, in seconds of CLOCK_MONOTONIC; None where there is no lease."""
        await self._send({"deadline": monotonic_s})

    async def memo(self, values: Mapping[str, Any]) -> None:
        """Replace what the next agent is to know.

        Raises:
            ValueError: it is longer than init remembers.
        """
        message: dict[str, object] = {"memo": dict(values)}
        if len(json.dumps(message)) > init.MEMO_BYTES_MAX:
            raise ValueError(f"a memo of more than {init.MEMO_BYTES_MAX} bytes")
        await self._send(message)

    async def companion(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, log: str | None = None
    ) -> int:
        """Start a process that outlives agents and dies with init, and return its pid; a running one is left alone.

        Args:
            name: what it is called here.
            argv: its command. One that can not be started exits with 127.
            env: variables added to init's own environment.
            log: the file its output is added to; None for init's own output.

        Raises:
            InitLinkError: init did not answer.
        """
        if self._loop is None:
            raise InitLinkError("listen() comes first")
        answer = self._companions.get(name)
        if answer is None:
            answer = self._companions[name] = self._loop.create_future()
            await self._send({"companion": name, "argv": list(argv), "env": dict(env or {}), "log": log})
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise InitLinkError(f"init did not answer for the companion {name!r}") from error
        finally:
            self._companions.pop(name, None)

    async def stop_companion(self, name: str, grace_s: float = init.STOP_GRACE_S) -> None:
        """Have init end a companion: SIGTERM, and SIGKILL after the grace. Its exit is reported as any other."""
        await self._send({"stop_companion": name, "grace_s": grace_s})

    def close(self) -> None:
        """Let go of the line. Init goes on enforcing what it was told."""
        if self._loop is not None:
            self._loop.remove_reader(self._packets.fd)
            self._loop.remove_writer(self._packets.fd)
            self._loop = None
        self._packets.close()

    # --- packets -----------------------------------------------------------------------------------------------------

    async def _send(self, message: dict[str, object], fd: int = -1) -> None:
        self._packets.send(message, fd)
        while self._packets.waiting:  # init was busy killing; it reads again in a moment
            if self._flushed is None:
                loop = asyncio.get_running_loop()
                self._flushed = loop.create_future()
                loop.add_writer(self._packets.fd, self._write)
            await asyncio.shield(self._flushed)

    def _write(self) -> None:
        self._packets.flush()
        if not self._packets.waiting and self._flushed is not None:
            asyncio.get_running_loop().remove_writer(self._packets.fd)
            self._flushed.set_result(None)
            self._flushed = None

    def _read(self) -> None:
        while self._loop is not None:
            try:
                packet, fds = self._packets.receive()
            except BlockingIOError:
                return
            for fd in fds:
                os.close(fd)
            if not packet:
                self._lost()
                return
            self._take(json.loads(packet))

    def _take(self, message: dict[str, Any]) -> None:
        if "fenced" in message:
            self._on_fenced()
        elif "companion" in message:
            answer = self._companions.get(message["companion"])
            if answer is not None and not answer.done():
                answer.set_result(message["pid"])
        elif "companion_exited" in message:
            self._on_companion_exited(message["companion_exited"], message["status"])

    def _lost(self) -> None:
        """Init is gone; the kernel is about to end this process too."""
        if self._loop is not None:
            self._loop.remove_reader(self._packets.fd)
        for answer in self._companions.values():
            if not answer.done():
                answer.set_exception(InitLinkError("init is gone"))


def _nothing(*_: object) -> None:
    """Stand in for a callback until `listen` is called."""
