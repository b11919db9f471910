"""What init and the process host ask of Linux: the process tree, late signals, packets that carry descriptors.

Standard library only, and little of it, since init loads it; no decision is made here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys

PACKET_BYTES_MAX = 131_072
OUTBOX_MAX = 1024

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Process:
    """One line of the process table."""

    __slots__ = ("frozen", "group", "parent", "session", "zombie")

    def __init__(self, stat: bytes) -> None:
        """Take in a /proc/PID/stat; the command's name in it may hold anything, a bracket included."""
        fields = stat.rpartition(b")")[2].split()
        self.zombie, self.frozen = fields[0] in (b"Z", b"X"), fields[0] == b"T"
        self.parent, self.group, self.session = int(fields[1]), int(fields[2]), int(fields[3])


def processes() -> dict[int, Process]:
    """Every process in sight, by pid; empty where /proc is absent or shows another PID namespace."""
    found: dict[int, Process] = {}
    try:
        names = os.listdir("/proc") if os.readlink("/proc/self") == str(os.getpid()) else []
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # it may be gone meanwhile
                found[int(name)] = Process(stat.read())
    return found


def is_alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return not Process(stat.read()).zombie
    except OSError:
        return False


def is_frozen(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger holds is not, as py-spy does for a while."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return Process(stat.read()).frozen
    except OSError:
        return False


def hears(pid: int, number: int) -> bool:
    """Whether a process catches a signal, or waits for it; process 1 is not ended by one that it does not hear.

    Raises:
        OSError: it may not be looked at, or there is none.
    """
    with open(f"/proc/{pid}/status", "rb") as status:
        masks = [line.split()[1] for line in status if line.startswith((b"SigBlk:", b"SigCgt:"))]
    return not masks or any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def family(table: dict[int, Process], roots: list[int]) -> set[int]:
    """The roots and all that descends from them."""
    offspring: dict[int, list[int]] = {}
    for pid, process in table.items():
        offspring.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    open_ends = list(roots)
    while open_ends:
        pid = open_ends.pop()
        if pid not in found:
            found.add(pid)
            open_ends.extend(offspring.get(pid, ()))
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone, or have become another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(pgid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group that may be gone.

    Raises:
        ValueError: no group has this number; the kernel would read it as "everybody", or as "mine".
    """
    if pgid <= 1:
        raise ValueError(f"{pgid} is no process group")
    kill(-pgid, number)


def wake(pid: int) -> None:
    """Give a process the usual claim to the processors, all its threads, if that is allowed."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def has_members(pgid: int) -> bool:
    """Whether anybody is in this process group, a zombie included."""
    try:
        os.kill(-pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def become_subreaper(*, becomes: bool = True) -> None:
    """Have orphans among all descendants become children of this process from now on, or of its ancestors again."""
    _prctl(_PR_SET_CHILD_SUBREAPER, becomes)


def die_with_parent(parent: int) -> None:
    """Be killed when the thread that made this process ends; end at once where that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def boot_id() -> str:
    """What tells this boot of this machine from any other; empty where the kernel does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def interpreter() -> tuple[str, str]:
    """What starts another process of the agent's: its Python, which finds nothing in the working directory.

    That one, and in an image PYTHONPATH, too, are the user's: a module of theirs must never be taken for one of ours.
    """
    return sys.executable, "-I" if sys.flags.isolated else "-P"


def spawn(
    argv: list[str],
    env: dict[str, str],
    *,
    fds: tuple[int, ...] = (),
    handled: list[int],
    blocked: tuple[int, ...] = (),
    log: str = "",
) -> int:
    """Start a process in a session of its own, which dies with this one, and return its pid.

    Args:
        argv: the command.
        env: its whole environment.
        fds: descriptors it inherits under their numbers, beyond the first three.
        handled: signals that this process has handlers for.
        blocked: signals that are blocked in the new process.
        log: file that its output is added to, with nothing to read; "" leaves the first three as they are.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(parent)
            os.setsid()  # so that a terminal's Ctrl-C comes through the parent alone
            signal.set_wakeup_fd(-1)
            for number in (*handled, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if log:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
                os.dup2(1, 2)
            for fd in fds:
                os.set_inheritable(fd, True)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.execvpe(argv[0], argv, env)
        except (OSError, ValueError, TypeError) as error:
            os.write(2, f"keepstep cannot start {argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class PacketLink:
    """One end of a SOCK_SEQPACKET connection that never blocks: JSON objects, some with a descriptor."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the connection over; what can not be sent at once waits for `flush`."""
        connection.setblocking(False)
        self._connection = connection
        self._outbox: list[tuple[bytes, int]] = []
        self.fd = connection.fileno()

    @property
    def waiting(self) -> int:
        """Packets that were not sent because the other end does not read."""
        return len(self._outbox)

    def send(self, message: dict[str, object], fd: int = -1) -> None:
        """Send a packet or line it up; a descriptor is duplicated, so the caller may close it.

        Raises:
            ValueError: it is longer than the other end takes.
            BufferError: OUTBOX_MAX packets wait already.
        """
        import json  # with the first packet: an agent is to start before that is loaded

        packet = json.dumps(message).encode()
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(f"a packet of {len(packet)} bytes; {PACKET_BYTES_MAX} are the most")
        if len(self._outbox) >= OUTBOX_MAX:
            raise BufferError(f"{OUTBOX_MAX} packets wait for a reader")
        self._outbox.append((packet, os.dup(fd) if fd >= 0 else -1))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it goes; a connection that is gone swallows it."""
        while self._outbox:
            packet, fd = self._outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))] if fd >= 0 else []
            try:
                self._connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                pass  # the reader's end is what matters, and it is told that elsewhere
            del self._outbox[0]
            if fd >= 0:
                os.close(fd)

    def receive(self) -> tuple[bytes, list[int]]:
        """Take one packet, with its descriptors, which are close-on-exec and the caller's to close.

        Returns:
            The packet, empty at the end of the connection.

        Raises:
            BlockingIOError: nothing has arrived.
        """
        try:
            packet, ancillary, _, _ = self._connection.recvmsg(
                PACKET_BYTES_MAX, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return b"", []
        fds = [
            int.from_bytes(data[at : at + 4], sys.byteorder)
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for at in range(0, len(data) - 3, 4)
        ]
        return packet, fds

    def close(self) -> None:
        for _, fd in self._outbox:
            if fd >= 0:
                os.close(fd)
        self._outbox.clear()
        self._connection.close()


def empty(fd: int) -> None:
    """Read a non-blocking descriptor until nothing is there."""
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
