"""The outermost process of a host: small enough never to fail, and there when everything else does.

It starts the agent and hands signals to it, reaps whatever dies, keeps file descriptors and a memo while the agent is
restarted, kills the worker groups when the lease deadline passes, and leaves no process behind. It decides nothing.

The agent talks to it over a SOCK_SEQPACKET socket (its number stands in KEEPSTEP_INIT_FD), one JSON object per packet:

    {"keep": name, "meta": {...}} + descriptor    keep it, hand it to the next agent        {"drop": name}
    {"group": pgid}                               a worker's group, killed with the agent   {"ungroup": pgid}
    {"deadline": monotonic seconds | null}        kill all groups when it passes      ->  {"fenced": true}
    {"memo": {...}}                               given back to the next agent
    {"companion": name, "argv": [...],            start what outlives agents          ->  {"companion": name, "pid": n}
        "env": {...}, "log": path}                                                    ->  {"companion_exited": name,
    {"stop_companion": name, "grace_s": n}        SIGTERM, then SIGKILL                       "status": code or -signal}

KEEPSTEP_INIT_STATE tells an agent what was there before it: {"boot": n, "kept": {name: {"fd": n, "meta": {...}}},
"memo": {...}, "companions": {name: pid}, "signals": [n, ...]}; the signals are those that asked an earlier agent to
stop. An agent starts with FORWARDED blocked, so that none is lost: it unblocks them once its handlers stand.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time

from keepstep import kernel

TYPE_CHECKING = False  # as type checkers know it, without loading typing
if TYPE_CHECKING:
    from typing import Any

ENV_FD = "KEEPSTEP_INIT_FD"
ENV_STATE = "KEEPSTEP_INIT_STATE"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
EXIT_BUG = 70
RESTARTS_MAX = 5
RESTARTS_WINDOW_S = 600.0
KEPT_MAX, META_BYTES_MAX, MEMO_BYTES_MAX = 64, 512, 65_536
"""Together they fit into one environment string, for which Linux has 128 KiB."""
SWEEP_S = 15.0
"""How long a killed process may take to go; one that hangs in a driver must not hold the container for ever."""
STOP_GRACE_S = 5.0

_FIRST = '{"boot": 0, "kept": {}, "memo": {}, "companions": {}, "signals": []}'
"""What the first agent is told: it starts before json is loaded here."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(
    argv: list[str],
    *,
    agent_command: list[str] | None = None,
    restarts_max: int = RESTARTS_MAX,
    restarts_window_s: float = RESTARTS_WINDOW_S,
) -> int:
    """Run an agent until it is done, and return the exit code of this host.

    Args:
        argv: the arguments of the agent.
        agent_command: what to start in its place; `argv` is appended.
        restarts_max: how often a dead agent is started again within the window.
        restarts_window_s: length of that window, in seconds.
    """
    command = agent_command or [*kernel.interpreter(), os.path.join(os.path.dirname(__file__), "app", "agent.py")]
    return Init([*command, *argv], restarts_max, restarts_window_s).run()


class Companion:
    """A process that outlives agents: the etcd member."""

    __slots__ = ("kill_at", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.kill_at: float | None = None


class Init:
    """The state of the outermost process, and its loop."""

    def __init__(self, command: list[str], restarts_max: int, restarts_window_s: float) -> None:
        self.command = command
        self.restarts_max = restarts_max
        self.restarts_window_s = restarts_window_s
        self.restarted: list[float] = []
        self.pid = os.getpid()
        self.boot = 0
        self.agent = 0
        self.agent_status: int | None = None
        self.link: kernel.PacketLink | None = None
        self.arrived: set[int] = set()
        self.forwarded: list[int] = []
        self.kept: dict[str, tuple[int, object]] = {}
        self.memo: dict[str, object] = {}
        self.companions: dict[str, Companion] = {}
        self.groups: set[int] = set()
        self.deadline: float | None = None
        self.fenced = False
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.handled: list[int] = []
        self.poll = select.poll()

    # --- loop --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Go on until an agent has ended for good and nothing is left."""
        kernel.become_subreaper()
        self._listen()
        try:
            self._start_agent()
            while True:
                self._turn()
                if self.agent_status is not None:
                    code = self._agent_ended(self.agent_status)
                    if code is not None:
                        return code
        except OSError as error:
            _say(f"cannot go on: {error}")
            return EXIT_BUG
        finally:
            self._close_link()
            self._sweep(spare_companions=False)

    def _turn(self) -> None:
        self._wait(self._next_alarm())
        for number in sorted(self.arrived & set(FORWARDED)):
            self.arrived.discard(number)
            self._forward(number)
        self._reap()
        self._read_link()  # before the deadline is judged: a renewal may be waiting here
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            self._fence()
        for companion in self.companions.values():
            if companion.kill_at is not None and now >= companion.kill_at:
                companion.kill_at = None
                kernel.kill(companion.pid)
        if self.link is not None:
            self.link.flush()
            self.poll.modify(self.link.fd, select.POLLIN | (select.POLLOUT if self.link.waiting else 0))

    def _next_alarm(self) -> float | None:
        alarms = [self.deadline, *(companion.kill_at for companion in self.companions.values())]
        return min((alarm for alarm in alarms if alarm is not None), default=None)

    def _wait(self, until: float | None) -> None:
        """Wait for a signal, a packet or a moment."""
        # rounded up: waking a moment early would only make it turn again
        timeout_ms = None if until is None else max(0, int(min(until - time.monotonic(), 3600.0) * 1000) + 1)
        for fd, _ in self.poll.poll(timeout_ms):
            if fd == self.wake_r:
                kernel.empty(self.wake_r)

    def _listen(self) -> None:
        """Have signals wake the loop; the handlers only note which."""
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        self.poll.register(self.wake_r, select.POLLIN)
        for number in (*FORWARDED, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, lambda arrived, _frame: self.arrived.add(arrived))
            self.handled.append(number)

    def _forward(self, number: int) -> None:
        if number in STOPPING and number not in self.forwarded:
            self.forwarded.append(number)
        if self.agent:
            kernel.kill(self.agent, number)

    def _reap(self) -> bool:
        """Collect every dead child; True while others are alive."""
        self.arrived.discard(signal.SIGCHLD)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.agent:
                self.agent, self.agent_status = 0, status
            for name in [name for name, companion in self.companions.items() if companion.pid == pid]:
                del self.companions[name]
                self._tell({"companion_exited": name, "status": os.waitstatus_to_exitcode(status)})

    # --- agent -------------------------------------------------------------------------------------------------------

    def _start_agent(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = kernel.PacketLink(ours)
        self.poll.register(ours, select.POLLIN)
        env = {**os.environ, ENV_FD: str(theirs.fileno()), ENV_STATE: self._state()}
        fds = (theirs.fileno(), *(fd for fd, _ in self.kept.values()))
        self.agent_status = None
        self.agent = kernel.spawn(self.command, env, fds=fds, handled=self.handled, blocked=FORWARDED)
        theirs.close()
        import json  # noqa: F401 - beside the agent's own start: what its packets are read with

    def _state(self) -> str:
        if self.boot == 0:
            return _FIRST
        import json

        return json.dumps({
            "boot": self.boot,
            "kept": {name: {"fd": fd, "meta": meta} for name, (fd, meta) in self.kept.items()},
            "memo": self.memo,
            "companions": {name: companion.pid for name, companion in self.companions.items()},
            "signals": self.forwarded,
        })  # fmt: skip

    def _agent_ended(self, status: int) -> int | None:
        """Return this host's exit code, or start the agent again and return None."""
        self._read_link()
        self._close_link()
        code = os.waitstatus_to_exitcode(status)
        if code >= 0 and code != EXIT_BUG:
            return code
        final = 128 - code if code < 0 else code
        if -code in self.forwarded:
            return final  # it did what the signal does where nobody listens
        now = time.monotonic()
        self.restarted = [at for at in self.restarted if at > now - self.restarts_window_s]
        if len(self.restarted) >= self.restarts_max:
            _say(f"the agent ended with {code} again; {self.restarts_max} restarts are spent")
            return final
        _say(f"the agent ended with {code}; starting it again")
        self.restarted.append(now)
        self._sweep(spare_companions=True)
        self.groups.clear()
        self.deadline, self.fenced = None, False
        self.boot += 1
        self._start_agent()
        return None

    # --- link --------------------------------------------------------------------------------------------------------

    def _read_link(self) -> None:
        """Take in every packet that has arrived."""
        while self.link is not None:
            try:
                packet, fds = self.link.receive()
            except BlockingIOError:
                return
            if not packet:
                self._close_link()
                return
            try:
                self._obey(packet, fds)
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
                _say(f"a packet of the agent is not obeyed: {error!r}: {packet[:200]!r}")
            for fd in fds:  # those that are kept are gone from the list
                os.close(fd)

    def _close_link(self) -> None:
        if self.link is not None:
            self.poll.unregister(self.link.fd)
            self.link.close()
            self.link = None

    def _tell(self, message: dict[str, object]) -> None:
        if self.link is not None:
            with contextlib.suppress(BufferError):  # it has not read for very long
                self.link.send(message)

    def _obey(self, packet: bytes, fds: list[int]) -> None:
        """Do what a packet says; raises ValueError and its like where it makes no sense."""
        import json

        message = json.loads(packet)
        if "keep" in message:
            self._keep(str(message["keep"]), message.get("meta", {}), fds)
        elif "drop" in message:
            fd, _ = self.kept.pop(str(message["drop"]), (-1, None))
            if fd >= 0:
                os.close(fd)
        elif "group" in message:
            self._add_group(int(message["group"]))
        elif "ungroup" in message:
            self.groups.discard(int(message["ungroup"]))
        elif "deadline" in message:
            deadline = message["deadline"]
            self.deadline = None if deadline is None else max(0.0, float(deadline))
            self.fenced = False
        elif "memo" in message:
            if not isinstance(message["memo"], dict) or len(packet) > MEMO_BYTES_MAX:
                raise ValueError("no memo, or too long a one")
            self.memo = message["memo"]
        elif "companion" in message:
            self._start_companion(str(message["companion"]), message)
        elif "stop_companion" in message:
            self._stop_companion(str(message["stop_companion"]), float(message.get("grace_s", STOP_GRACE_S)))
        else:
            raise ValueError("unknown")

    def _keep(self, name: str, meta: object, fds: list[int]) -> None:
        if not fds:
            raise ValueError("a descriptor is missing")
        import json

        known = self.kept.get(name)
        if len(json.dumps([name, meta])) > META_BYTES_MAX or (known is None and len(self.kept) >= KEPT_MAX):
            raise ValueError("too much to keep")
        if known is not None:
            os.close(known[0])
        self.kept[name] = (fds.pop(0), meta)

    # --- companions and groups -------------------------------------------------------------------------------------

    def _start_companion(self, name: str, message: dict[str, Any]) -> None:
        if name not in self.companions:
            argv, env = message["argv"], message.get("env", {})
            if not isinstance(argv, list) or not argv or not isinstance(env, dict):
                raise TypeError("a companion needs a command")
            log = str(message.get("log") or "")
            pid = kernel.spawn([*map(str, argv)], {**os.environ, **env}, handled=self.handled, log=log)
            self.companions[name] = Companion(pid)
        self._tell({"companion": name, "pid": self.companions[name].pid})

    def _stop_companion(self, name: str, grace_s: float) -> None:
        if name in self.companions:
            self.companions[name].kill_at = time.monotonic() + grace_s
            kernel.kill(self.companions[name].pid, signal.SIGTERM)

    def _add_group(self, pgid: int) -> None:
        if pgid <= 1 or pgid in {self.agent, os.getpgrp(), *(each.pid for each in self.companions.values())}:
            raise ValueError("not a group of workers")
        self.groups.add(pgid)
        if self.fenced:
            kernel.kill_group(pgid)

    def _fence(self) -> None:
        """The lease has run out: nothing may train under it, whether the agent is awake or not."""
        self.deadline, self.fenced = None, True
        killed: set[int] = set()
        while doomed := self._doomed(spare_companions=True) - killed:
            self._kill_all(doomed)
            killed |= doomed
        self._kill_all(set())
        _say("the lease deadline has passed: the workers are killed")
        self._tell({"fenced": True})

    def _sweep(self, *, spare_companions: bool) -> None:
        """Kill and reap until no descendant is left; with companions spared, none but theirs and the agent."""
        until = time.monotonic() + SWEEP_S
        while True:
            doomed = self._doomed(spare_companions)
            self._kill_all(doomed)
            if self.pid == 1 and not spare_companions:
                kernel.kill(-1)
            if not self._reap():
                return
            if spare_companions and not doomed and not any(map(kernel.has_members, self.groups)):
                return
            now = time.monotonic()
            if now >= until:
                _say(f"some processes do not die: {sorted(doomed)}")
                return
            self._wait(min(until, now + 0.05))

    def _kill_all(self, doomed: set[int]) -> None:
        for pgid in self.groups:
            kernel.kill_group(pgid)
        for pid in doomed:
            kernel.kill(pid)

    def _doomed(self, spare_companions: bool) -> set[int]:
        """Every descendant; or only the workers' sessions and orphans, with what descends from them."""
        table = kernel.processes()
        if not spare_companions:
            return kernel.family(table, [self.pid]) - {self.pid}
        theirs = {companion.pid for companion in self.companions.values()}
        spared = kernel.family(table, [pid for pid, process in table.items() if process.session in theirs])
        spared.add(self.agent)
        roots = [
            pid
            for pid, process in table.items()
            if process.parent == self.pid or process.group in self.groups or process.session in self.groups
        ]
        return kernel.family(table, [pid for pid in roots if pid not in spared]) - spared


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # that nobody listens is no reason to stop
        os.write(2, f"keepstep init: {text}\n".encode())
