"""The socket to the agent: JSON messages, one a packet, with descriptors beside them.

The step path never touches it; it carries what happens seldom (hello, layouts, seals) and wakes a worker that waits.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES_MAX = 65536
_DESCRIPTORS_MAX = 64


class ChannelClosed(Exception):
    """The agent has gone; it or init is about to end this process."""


class Channel:
    """One end of an AF_UNIX SOCK_SEQPACKET pair."""

    def __init__(self, endpoint: socket.socket) -> None:
        """Take over `endpoint`; every wait is bounded by an argument, not by the socket."""
        endpoint.setblocking(False)
        self._socket = endpoint

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over an inherited descriptor and keep it from the programs that this process starts."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def close(self) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any], hint: bool = False, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Args:
            message: what to say; its `kind` tells what the rest means.
            hint: drop it rather than wait where the agent does not keep up (it reads the same from the wire).
            fds: descriptors that the agent gets with it; this process's own stay open.

        Raises:
            ChannelClosed: the agent has gone.
        """
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        packet = text.encode(errors="replace")  # half a surrogate pair, as of a file's name, is nothing to pass on
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self._socket.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if hint:
                    return
                select.select([], [self._socket], [])
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED):
                    raise ChannelClosed("the agent closed the socket") from error
                raise

    def receive(self, timeout_s: float | None) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and the descriptors that came with it (close-on-exec), None after `timeout_s`.

        Raises:
            ChannelClosed: the agent has gone.
        """
        if timeout_s != 0 and not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize)
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise ChannelClosed("the agent closed the socket") from error
        if not packet:
            raise ChannelClosed("the agent closed the socket")
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return json.loads(packet), list(descriptors)
