"""`keepstep doctor --aws`: what the platform is and does, seen from inside of a job, told until the platform ends it.

First the facts, then whatever comes: signals, other hosts that come and go, and a heartbeat each second, whose last one
says when SIGKILL came.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from keepstep.adapters.clock import monotonic
from keepstep.adapters.platform import rights
from keepstep.adapters.platform.neighbours import Door, Neighbour
from keepstep.adapters.platform.record import Record
from keepstep.app.platform_facts import facts_of, follow_metadata, found_by, secrets_in, tell_all
from keepstep.core.values import frozen
from keepstep.errors import ConfigError, ExitCode
from keepstep.intake.contract import Paths, read_hosts

GRACE_S = 130.0
"""How long it goes on after SIGTERM: longer than the 120 s after which the platform is said to send SIGKILL."""
NEIGHBOURS_MAX = 64
_BEAT_S = 1.0
_LOCALHOST = "localhost"


@frozen
class Look:
    """What was asked for.

    Attributes:
        leave: the host that goes after half of the time, with `exit_code`; None for no one.
        address: where this host listens; all of its own addresses by default.
        port: where every host of the job listens.
    """

    base: Path
    linger_s: float
    leave: str | None = None
    exit_code: int = 1
    address: str = "0.0.0.0"
    port: int = 20000


class Ending:
    """When this host ends, with which exit code, and why."""

    def __init__(self, started: float, linger_s: float, leaves_with: int | None) -> None:
        """End after `linger_s`, or after half of it with the code `leaves_with`; all times are seconds of one clock."""
        self.at = started + (linger_s if leaves_with is None else linger_s / 2)
        self.code, self.why = (0, "the time is over") if leaves_with is None else (leaves_with, "told to leave")
        self._interrupts = 0

    def on_signal(self, number: int, now: float) -> None:
        """SIGTERM sets another end, which no second one puts off; a person's second Ctrl-C is taken for what it is."""
        if number == signal.SIGTERM and self.code != ExitCode.INTERRUPTED:
            self.at, self.code, self.why = now + GRACE_S, int(ExitCode.INTERRUPTED), "SIGTERM, and nothing came of it"
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                self.at, self.code, self.why = now, 128 + number, "a second SIGINT"


def look(wanted: Look, environ: Mapping[str, str]) -> int:
    """Tell what is here and what happens, and return the exit code.

    Raises:
        ConfigError: the host that is to leave is none of the job's.
    """
    started = monotonic()
    try:
        resources = read_hosts(wanted.base, environ)
        host, hosts, why = resources.current_host, resources.hosts, ""
    except ConfigError as error:
        host, hosts, why = _LOCALHOST, (_LOCALHOST,), str(error)
    if wanted.leave is not None and wanted.leave not in hosts and not why:
        raise ConfigError(f"found {wanted.leave}", f"one of the hosts: {', '.join(hosts[:8])}", key="--leave")
    first, inherited = (found_by(partial(rights.process, pid)) for pid in (1, "self"))
    numbers = {int(number) for number in signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # before any thread, so that none is ended by one
    path = Paths(wanted.base.absolute()).output_data / "keepstep" / host / "platform.jsonl"
    record = Record(path, host, secrets_in(environ))
    record.write("hosts", hosts=list(hosts), **({"error": why} if why else {}))
    record.write("process 1", **first)
    record.write("this process", **inherited)
    stop = threading.Event()
    tell_all(record, facts_of(wanted.base.absolute(), host, environ))
    threading.Thread(target=follow_metadata, args=(record, stop), name="metadata", daemon=True).start()
    door = _meet(wanted, host, hosts, record, stop)
    ending = Ending(started, wanted.linger_s, wanted.exit_code if wanted.leave == host else None)
    _watch(record, ending, door, numbers)
    record.write("end", code=ending.code, why=ending.why)
    stop.set()
    record.close()
    return ending.code


def _meet(wanted: Look, host: str, hosts: tuple[str, ...], record: Record, stop: threading.Event) -> Door | None:
    """Be seen by the other hosts, and see them."""
    others = [other for other in hosts if other != host]
    watched = [other for other in others if other == wanted.leave]
    watched += [other for other in others if other != wanted.leave][: NEIGHBOURS_MAX - len(watched)]
    door = None
    try:
        door = Door(wanted.address, wanted.port, record.write)
        record.write("door", port=wanted.port, watched=len(watched), of=len(others))
    except (OSError, OverflowError) as error:
        record.write("door", port=wanted.port, watched=len(watched), of=len(others), error=str(error))
    for other in watched:
        Neighbour(other, wanted.port, record.write, stop)
    return door


def _watch(record: Record, ending: Ending, door: Door | None, numbers: set[int]) -> None:
    """Take signals and beat until the end."""
    beat_at, beats = monotonic(), 0
    while (now := monotonic()) < ending.at:
        if now >= beat_at:
            beats += 1
            record.write("heartbeat", beat=beats, monotonic_s=round(now, 6), ends_in_s=round(ending.at - now, 3))
            if door is not None:
                door.beat()
            beat_at = max(beat_at + _BEAT_S, now)
        got = signal.sigtimedwait(numbers, max(0.0, min(beat_at, ending.at) - monotonic()))
        if got is None:
            continue
        ending.on_signal(got.si_signo, monotonic())
        name, sender = rights.signal_name(got.si_signo), rights.sender(got.si_pid)
        told = {"number": got.si_signo, "sender_pid": got.si_pid, "sender_uid": got.si_uid, "sender": sender}
        record.write("signal", signal=name, code=got.si_code, **told)
        if got.si_signo == signal.SIGCHLD:
            _reap()


def _reap() -> None:
    """Orphans are process 1's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
