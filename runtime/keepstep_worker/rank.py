"""A rank that mpirun has started: a process that runs the user's script as its child, and tells how it ends.

Nobody but a parent learns for certain how a process has ended, and here the parent would be orted. The child is a
worker as any other: what it inherits is what `keepstep_worker.ranks` on this host has handed over.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, NamedTuple, NoReturn

from keepstep_worker import identity

VARIABLE = "KEEPSTEP_RANKS"
"""Names the socket, which is in no file system: an abstract one."""
_MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX = 65536, 8
_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
_OF_THE_HOST = ("KEEPSTEP_TLS", "KEEPSTEP_PLACES", "KEEPSTEP_LISTEN")
_OF_THE_FIRST = (VARIABLE, "KEEPSTEP_STACKS_FILE")
"""What other ranks have no use for."""
_ORPHANED = 143


class Ended(NamedTuple):
    """How a process ended: by a code or by a signal, the other is None."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def of(cls, returncode: int) -> Ended:
        return cls(returncode, None) if returncode >= 0 else cls(None, -returncode)

    @property
    def is_well(self) -> bool:
        return self.exit_code == 0


def become_child() -> None:
    """Return in the process that is to run the script; this one stays behind, and ends as that one does.

    Raises:
        IdentityError: this is no process that mpirun has started below keepstep.
    """
    name = os.environ.get(VARIABLE)
    if name is None or _RANK not in os.environ:
        raise identity.IdentityError(f"--rank is for what mpirun starts below keepstep: {VARIABLE}, {_RANK}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until somebody is there to tell of it
    local_rank = int(os.environ[_LOCAL_RANK])
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect("\0" + name)
    send(line, {"kind": "hello", "local_rank": local_rank, "rank": int(os.environ[_RANK])}, [])
    _, fds = receive(line)
    if len(fds) != 2:
        os._exit(_ORPHANED)
    _take_on(local_rank, fds)
    child = os.fork()
    if child:
        for fd in fds:
            os.close(fd)
        _attend(child, line)
    line.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell_restored(fd: int, step: int, size_bytes: int) -> None:
    """Have the other ranks of this host restore what this one does; `fd` is negative where that is nothing."""
    name = os.environ.get(VARIABLE)
    if name is not None and os.environ.get(_LOCAL_RANK) == "0" and os.environ.get(_LOCAL_SIZE) != "1":
        # where the host's process is going, this one does, too
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect("\0" + name)
            send(line, {"kind": "restored", "step": step, "bytes": size_bytes}, [fd] if fd >= 0 else [])


def _take_on(local_rank: int, fds: list[int]) -> None:
    """Be a worker in what the environment says: rank and size are mpirun's, not the host's."""
    told = {
        "KEEPSTEP_RANK": os.environ[_RANK],
        "KEEPSTEP_LOCAL_RANK": str(local_rank),
        "KEEPSTEP_WORLD_SIZE": os.environ[_SIZE],
        "KEEPSTEP_PARENT_PID": str(os.getpid()),
        **identity.descriptor_variables(*fds),
    }
    file = os.environ.get("KEEPSTEP_FAILURE_FILE")
    if file:
        told["KEEPSTEP_FAILURE_FILE"] = error_file(file, local_rank)
    for name in (*_OF_THE_HOST, *(_OF_THE_FIRST if local_rank else ())):
        os.environ.pop(name, None)
    os.environ.update(told)


def _attend(child: int, line: socket.socket) -> NoReturn:
    """Wait for the child's end and tell of it; end it where the host's own process goes.

    mpirun sends SIGTERM to both when it ends a world, and that is told; how the child takes it is the child's affair.
    What the host passes on is for the child alone.
    """
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        readable, _, _ = select.select([awake, line.fileno()], [], [])
        if awake in readable and signal.SIGTERM in os.read(awake, 64):
            send(line, {"kind": "told"}, [])
        if line.fileno() in readable:
            packet, _ = receive(line)
            os.kill(child, int(json.loads(packet)["signal"]) if packet else signal.SIGKILL)
            if not packet:
                os.waitpid(child, 0)
                os._exit(_ORPHANED)
    ended = Ended.of(os.waitstatus_to_exitcode(status))
    said: dict[str, Any] = {"kind": "ended", "exit_code": ended.exit_code, "signal": ended.signal}
    send(line, said, [])
    end_as(ended)


def end_as(ended: Ended) -> NoReturn:
    """End as another process did, without another core dump."""
    sys.stdout.flush()
    sys.stderr.flush()
    if ended.signal is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if ended.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(ended.signal, signal.SIG_DFL)
        os.kill(os.getpid(), ended.signal)
    os._exit(ended.exit_code if ended.exit_code is not None else 128 + (ended.signal or 0))


def error_file(path: str, local_rank: int) -> str:
    """Where a rank writes its first error: only that of the one which failed first is the host's."""
    return f"{path}.{local_rank}"


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and the descriptors beside it; an empty one where the other side has gone."""
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize)
    try:
        packet, ancillary, _, _ = line.recvmsg(_MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b"", []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, list(fds)


def send(line: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    """Send a packet with descriptors; nothing happens where the other side has gone."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(OSError):
        line.sendmsg([json.dumps(message).encode()], rights, socket.MSG_NOSIGNAL)
