"""A host's ranks that mpirun starts, which are one worker to the agent.

    PYTHON -m keepstep_worker --mpirun mpirun WORDS...   on the first host
    PYTHON -m keepstep_worker --orted                    on each other one: runs what the first host's mpirun asks for

mpirun and orted hand nothing down but the environment, so a rank (`keepstep_worker.rank`) finds this process by a
socket's name. The host's first rank gets the agent's own line and wire; the others a wire of their own, on which this
process plays the agent: it has them restore what the first one restores, and wants nothing else of them. When a rank
fails, this process ends as that rank did; where mpirun ends all ranks since one on another host has failed, it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from keepstep_worker import firsterror, identity, launcher
from keepstep_worker.rank import VARIABLE, Ended, end_as, error_file, receive, send
from keepstep_worker.wire import INQUIRIES, Orders, Seal, Wire

_LINGER_S = 1.0
"""How long a rank's last words may take through orted and mpirun."""
_YIELD_S = 3.0
"""How long a host whose ranks were ended has patience: the one where a rank failed is to be heard first."""
_WORDS_S = 0.5
_SLAB = 0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PEER_LOST = 1


class _Rank:
    """One rank of this host, and the line to it."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.number = self.local_rank = -1
        self.ended: Ended | None = None
        self.follows: Follower | None = None
        self.told = False

    @property
    def ended_by_itself(self) -> bool:
        """Whether it has ended by a code, and so may have said why."""
        return self.ended is not None and self.ended.exit_code is not None


class Follower:
    """The agent's part towards a rank that restores what another one does, and saves nothing."""

    def __init__(self, on_inquiries: Callable[[int], None]) -> None:
        """Args: on_inquiries: given the descriptor by which the agent may ask the rank."""
        self._on_inquiries = on_inquiries
        self.wire_fd = Wire.create()
        self._wire = Wire(self.wire_fd)
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        asyncio.get_running_loop().add_reader(self._ours.fileno(), self._hear)

    def restore(self, generation: int, state: Restored) -> None:
        """Order what the host's first rank was ordered."""
        if state.fd < 0:
            self._wire.write_orders(Orders(1, generation))
        else:
            self._wire.write_seal(Seal(_SLAB, state.step, 1, state.size_bytes, 0, generation, time.monotonic_ns()))
            self._wire.write_orders(Orders(1, generation, restore_slab=_SLAB, restore_step=state.step))
        slabs = [{"slab": _SLAB, "bytes": state.size_bytes}] if state.fd >= 0 else []
        send(self._ours, {"kind": "slabs", "slabs": slabs}, [state.fd] if slabs else [])

    def _hear(self) -> None:
        """Little that it says matters, but it is not to wait until somebody listens."""
        packet, fds = receive(self._ours)
        if not packet:
            asyncio.get_running_loop().remove_reader(self._ours.fileno())
        elif fds and json.loads(packet).get("kind") == INQUIRIES:
            self._on_inquiries(fds[0])
        for fd in fds:
            os.close(fd)


class Restored(NamedTuple):
    """What the host's first rank was told to restore; `fd` is negative for nothing."""

    fd: int
    step: int
    size_bytes: int


class Host:
    """Watches the ranks of this host from here, and what starts them."""

    def __init__(self, leads: bool) -> None:
        """Listen for ranks, in the running loop.

        Args:
            leads: whether mpirun runs here, whose own failures are this host's.
        """
        self._leads = leads
        self._inherited = identity.read_descriptors()
        for fd in self._inherited:
            os.set_inheritable(fd, False)
        self._generation = identity.read_identity().generation
        self._file = os.environ.get("KEEPSTEP_FAILURE_FILE", "")
        self._name = f"keepstep-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self._name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._ranks: list[_Rank] = []
        self._restored: Restored | None = None
        self._is_victim = self._passed_on = False
        self._failed: asyncio.Future[_Rank] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def run(self, command: list[str], **more: str) -> Ended:
        """Start what starts the ranks; return how this host's part of the world ended.

        Args:
            more: variables for it.
        """
        environment = {k: v for k, v in os.environ.items() if k not in identity.DESCRIPTOR_VARIABLES} | more
        for number in _PASSED_ON:
            asyncio.get_running_loop().add_signal_handler(number, self._pass_on, number)
        # in a group of its own: a signal for the script is none for mpirun, which would end all ranks
        process = await asyncio.create_subprocess_exec(
            *command, env={**environment, VARIABLE: self._name}, preexec_fn=os.setpgrp
        )
        exited = asyncio.ensure_future(process.wait())
        either: set[asyncio.Future[Any]] = {exited, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._failed.done():  # what its ranks had to say, they have said
            await asyncio.wait({self._failed}, timeout=_WORDS_S if self._is_awaited() else 0.0)
        if self._failed.done() and self._failed.result().ended_by_itself:
            await asyncio.wait({exited}, timeout=_LINGER_S)
        ended = self._verdict(Ended.of(process.returncode) if process.returncode is not None else None)
        if self._is_victim and not self._passed_on:
            await asyncio.sleep(_YIELD_S)
        return ended

    def _verdict(self, launcher_ended: Ended | None) -> Ended:
        if self._failed.done():
            rank = self._failed.result()
            self._show_error_of(rank)
            assert rank.ended is not None
            return rank.ended
        assert launcher_ended is not None, "one of the two has come"
        if launcher_ended.signal is not None or (self._leads and not self._ranks):
            return launcher_ended
        if launcher_ended.is_well and not self._is_awaited() and all(r.ended and r.ended.is_well for r in self._ranks):
            return launcher_ended
        self._is_victim = True
        lost = ConnectionAbortedError("mpirun has ended the ranks of this host: one on another host has failed")
        if self._file:
            told = firsterror.describe(lost, identity.read_identity().rank, self._generation, 0)
            firsterror.write(self._file, {**told, "victim": True})
        return Ended(launcher_ended.exit_code or _PEER_LOST, None)

    def _pass_on(self, number: int) -> None:
        """The agent has a signal for the script: each rank's gets it."""
        self._passed_on = True
        for rank in self._ranks:
            send(rank.line, {"signal": number}, [])

    def _is_awaited(self) -> bool:
        """Whether some rank has not said yet how it ended."""
        return any(rank.ended is None for rank in self._ranks)

    def _show_error_of(self, rank: _Rank) -> None:
        """What the rank that failed first has said is this host's error; of one that said nothing, whose end it is."""
        if self._file:
            try:
                os.replace(error_file(self._file, rank.local_rank), self._file)
            except OSError:
                firsterror.write(self._file, firsterror.silence(rank.number, self._generation))

    # --- what ranks say ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            if _is_ours(line):
                rank = _Rank(line)
                asyncio.get_running_loop().add_reader(line.fileno(), self._receive, rank)
            else:
                line.close()

    def _receive(self, rank: _Rank) -> None:
        packet, fds = receive(rank.line)
        if not packet:
            asyncio.get_running_loop().remove_reader(rank.line.fileno())
            rank.line.close()
            if rank.local_rank >= 0:
                self._end(rank, Ended(None, signal.SIGKILL))  # nothing else ends it without a word
            return
        said = json.loads(packet)
        if said["kind"] == "hello":
            rank.number = int(said["rank"])
            self._greet(rank, int(said["local_rank"]))
        elif said["kind"] == "told":
            rank.told = True
        elif said["kind"] == "restored":
            if self._restored is not None and self._restored.fd >= 0:
                os.close(self._restored.fd)
            self._restored = Restored(fds[0] if fds else -1, int(said["step"]), int(said["bytes"]))
            for each in self._ranks:
                self._tell(each)
        elif said["kind"] == "ended":
            self._end(rank, Ended(said["exit_code"], said["signal"]))

    def _greet(self, rank: _Rank, local_rank: int) -> None:
        rank.local_rank = local_rank
        self._ranks.append(rank)
        if local_rank == 0:
            fds = self._inherited
        else:
            rank.follows = Follower(lambda fd: self._pass_up(INQUIRIES, rank, [fd]))
            fds = rank.follows.wire_fd, rank.follows.theirs.fileno()
        # the agent compares the steps of all ranks: have it read this one's, too, before that one says anything itself
        self._pass_up("ring", rank, [] if rank.follows is None else [rank.follows.wire_fd])
        send(rank.line, {"kind": "line"}, list(fds))
        if rank.follows is not None:
            rank.follows.theirs.close()
        self._tell(rank)

    def _pass_up(self, kind: str, rank: _Rank, fds: list[int]) -> None:
        """Have the agent get something of a rank's."""
        with socket.socket(fileno=os.dup(self._inherited[1])) as line:
            send(line, {"kind": kind, "rank": rank.number}, fds)

    def _tell(self, rank: _Rank) -> None:
        if rank.follows is not None and self._restored is not None:
            rank.follows.restore(self._generation, self._restored)

    def _end(self, rank: _Rank, ended: Ended) -> None:
        if rank.ended is not None:
            return
        rank.ended = ended
        # mpirun ends what is left of a world by SIGTERM first, whatever the rank makes of that
        by_others = rank.told or self._passed_on or ended.signal == signal.SIGTERM
        if not ended.is_well and not by_others and not self._failed.done():
            self._failed.set_result(rank)


def lead(words: list[str]) -> NoReturn:
    """Run mpirun, with keepstep in the place of ssh."""
    own = ["-mca", "plm_rsh_agent", f"{sys.executable} -m keepstep_worker --reach", "--leave-session-attached"]
    if shutil.which(words[0]) is None:
        print(f"keepstep: {words[0]} is not on PATH", file=sys.stderr, flush=True)
        sys.exit(127)

    async def run() -> Ended:
        return await Host(leads=True).run([words[0], *own, *words[1:]])

    end_as(asyncio.run(run()))


def follow() -> NoReturn:
    """Wait for what mpirun on the first host wants to be run here, and run it."""

    async def run() -> Ended:
        host = Host(leads=False)
        request = await launcher.wait_for_request()
        ended = await host.run(["/bin/sh", "-c", request.command], **launcher.session())
        await request.tell(ended.exit_code if ended.exit_code is not None else 128 + (ended.signal or 0))
        return ended

    end_as(asyncio.run(run()))


def _is_ours(line: socket.socket) -> bool:
    """Whether the same user is at the other end: an abstract socket is everybody's to find."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] == os.getuid())
