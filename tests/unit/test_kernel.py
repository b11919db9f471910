"""Reading the process table, and numbers that must never reach the kernel."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from keepstep import kernel
from keepstep.app.faults import kill_family


def line(parent: int, group: int = 0, session: int = 0, state: str = "S", name: str = "python") -> kernel.Process:
    return kernel.Process(f"1 ({name}) {state} {parent} {group} {session} 0 -1".encode())


@pytest.mark.parametrize("name", ["python", "a b", ") R 1 1 1 (", "tab\there"])
def test_a_stat_line_is_read_whatever_the_command_is_called(name):
    process = line(7, 8, 9, name=name)
    assert (process.parent, process.group, process.session, process.zombie) == (7, 8, 9, False)
    assert line(7, state="Z", name=name).zombie


def test_a_family_is_the_roots_and_all_their_offspring():
    table = {1: line(0), 10: line(1), 11: line(10), 12: line(11), 20: line(1), 21: line(20)}
    assert kernel.family(table, [10]) == {10, 11, 12}
    assert kernel.family(table, [11, 20, 11]) == {11, 12, 20, 21}
    assert kernel.family(table, [1]) == set(table)
    assert kernel.family(table, []) == set()


def test_this_process_is_in_the_table():
    mine = kernel.processes()[os.getpid()]
    assert (mine.parent, mine.group, mine.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert kernel.is_alive(os.getpid())
    assert kernel.has_members(os.getpgrp())


@pytest.mark.parametrize("pgid", [1, 0, -1, -7])
def test_everybody_and_oneself_are_no_group(pgid):
    with pytest.raises(ValueError, match="no process group"):
        kernel.kill_group(pgid, 0)


def test_packets_carry_objects_and_descriptors():
    one, other = (kernel.PacketLink(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held = os.memfd_create("held")
    os.write(held, b"content")
    one.send({"keep": "slab"}, held)
    os.close(held)
    packet, fds = other.receive()
    assert packet == b'{"keep": "slab"}'
    assert os.pread(fds[0], 9, 0) == b"content"
    assert not os.get_inheritable(fds[0])
    os.close(fds[0])
    with pytest.raises(BlockingIOError):
        other.receive()
    with pytest.raises(ValueError, match="the most"):
        one.send({"long": "x" * kernel.PACKET_BYTES_MAX})
    one.close()
    assert other.receive() == (b"", [])
    other.send({"to": "nobody"})
    assert other.waiting == 0
    other.close()


def test_what_a_reader_does_not_take_waits_within_bounds():
    one, other = (kernel.PacketLink(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    sent = 0
    while one.waiting < kernel.OUTBOX_MAX:
        one.send({"turn": sent}, 0)
        sent += 1
    with pytest.raises(BufferError):
        one.send({"turn": sent})
    got = 0
    while got < sent:
        packet, fds = other.receive()
        for fd in fds:
            os.close(fd)
        assert packet == b'{"turn": %d}' % got
        got += 1
        one.flush()
    one.close()
    other.close()


@pytest.mark.parametrize("pid_of", [lambda: 0, lambda: 1, os.getppid, os.getpid])
def test_nobody_kills_a_family_that_he_is_of(pid_of, monkeypatch):
    monkeypatch.setattr(kernel, "kill", lambda *_: pytest.fail("a signal was sent"))
    with pytest.raises(ValueError, match="no host"):
        kill_family(pid_of())


def test_who_hears_a_signal() -> None:
    """Whoever has a handler, or waits for it; not who leaves it to the kernel or ignores it."""
    previous = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert not kernel.hears(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not kernel.hears(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        assert kernel.hears(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        assert kernel.hears(os.getpid(), signal.SIGUSR2)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        signal.signal(signal.SIGUSR2, previous)


@pytest.mark.parametrize(("state", "frozen"), [("T", True), ("t", False), ("S", False), ("D", False)])
def test_who_is_held_by_a_debugger_is_not_stopped_by_a_signal(state, frozen):
    """py-spy holds a worker while it reads its native stacks: nobody is to blame for that."""
    assert kernel.Process(f"7 (a) b) {state} 1 2 3 0".encode()).frozen is frozen
