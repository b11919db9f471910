"""Other hosts: a port on which they see that this one lives, and a watch on each of them.

Whoever listens sends a byte to everybody connected, each second. So a host whose container is gone without a word is
told from one that is silent, and both from one whose name or port is gone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from keepstep.adapters.platform.machine import resolve

Tell = Callable[..., None]
"""Takes what was seen, and the facts of it."""

CALLERS_MAX = 256
CHANGES_MAX = 200
"""So many changes of one host's state are told."""
_EVERY_S = 0.5
_CONNECT_S = 3.0
SILENT_S = 5.0


class Door:
    """A port that this host listens on; a thread takes callers in."""

    def __init__(self, address: str, port: int, tell: Tell) -> None:
        """Listen.

        Raises:
            OSError: the port can not be had.
        """
        self._tell = tell
        self._callers: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server((address, port), backlog=CALLERS_MAX)
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def beat(self) -> None:
        """Let every caller see that this host lives; those that do not read any more are gone."""
        with self._lock:
            callers = list(self._callers.items())
        for connection, address in callers:
            try:
                connection.send(b".", socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            except OSError as error:
                with self._lock:
                    del self._callers[connection]
                connection.close()
                self._tell("caller", address=address, state="gone", error=str(error))

    def _run(self) -> None:
        while True:
            try:
                connection, (address, _) = self._listener.accept()
            except OSError as error:
                self._tell("caller", state="none", error=str(error))
                return
            if len(self._callers) >= CALLERS_MAX:
                connection.close()
                continue
            connection.setblocking(False)
            self._tell("caller", address=address, state="connected")
            with contextlib.suppress(OSError):
                connection.send(b".", socket.MSG_NOSIGNAL)
            with self._lock:
                self._callers[connection] = address


class Neighbour:
    """Tells each change of what is seen of another host."""

    def __init__(self, host: str, port: int, tell: Tell, stop: threading.Event, silent_s: float = SILENT_S) -> None:
        """Begin to look, in a thread.

        Args:
            silent_s: from then on a host that says nothing is gone.
        """
        self._host, self._port, self._tell, self._stop, self._silent_s = host, port, tell, stop, silent_s
        self._told: tuple[str, str] = ("", "")
        self._changes = 0
        self.thread = threading.Thread(target=self._run, name=f"watches {host}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                addresses = resolve(self._host)
            except (OSError, ValueError) as error:
                self._say("unresolved", error=str(error))
            else:
                self._call(addresses)
            self._stop.wait(_EVERY_S)

    def _call(self, addresses: list[str]) -> None:
        try:
            connection = socket.create_connection((self._host, self._port), timeout=_CONNECT_S)
        except OSError as error:
            self._say("unreachable", error=str(error), addresses=addresses)
            return
        with connection:
            connection.settimeout(self._silent_s)
            try:
                if not connection.recv(64):
                    self._say("closed", error="at once", addresses=addresses)
                    return
            except OSError as error:  # it may be stopped: its kernel takes callers all the same
                self._say("mute", error=str(error), addresses=addresses)
                return
            self._say("connected", address=connection.getpeername()[0], addresses=addresses)
            self._stay(connection)

    def _stay(self, connection: socket.socket) -> None:
        try:
            while connection.recv(64):
                pass
        except TimeoutError:
            self._say("gone", error=f"silent for {self._silent_s:g} s")
        except OSError as error:
            self._say("gone", error=str(error))
        else:
            self._say("gone", error="closed the connection")

    def _say(self, state: str, *, error: str = "", **found: object) -> None:
        if (state, error) == self._told or self._changes >= CHANGES_MAX:
            return
        self._told, self._changes = (state, error), self._changes + 1
        if error:
            found["error"] = error
        self._tell("neighbour", neighbour=self._host, port=self._port, state=state, **found)
