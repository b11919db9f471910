"""Hands frames from one network device to another, each a while later: `delay_proxy.py DEVICE DEVICE SECONDS`.

A process of its own, to be started where the devices are. Says `ready` once it does.
"""

from __future__ import annotations

import collections
import select
import socket
import sys
import time

_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_FRAME_BYTES_MAX = 65536
_WAITING_MAX = 100_000
"""Frames under way; what comes beyond that is lost, as in a full queue."""


def open_device(name: str) -> socket.socket:
    """A socket for all frames that come in at a device."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    device.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    device.bind((name, 0))
    device.setblocking(False)
    return device


def main() -> None:
    one, other, delay_s = open_device(sys.argv[1]), open_device(sys.argv[2]), float(sys.argv[3])
    beyond = {one.fileno(): (one, other), other.fileno(): (other, one)}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    poll = select.poll()
    for fd in beyond:
        poll.register(fd, select.POLLIN)
    print("ready", flush=True)
    while True:
        timeout_ms = None if not waiting else max(0.0, (waiting[0][0] - time.monotonic()) * 1000)
        for fd, _ in poll.poll(timeout_ms):
            source, target = beyond[fd]
            try:
                frame = source.recv(_FRAME_BYTES_MAX)
            except OSError:  # the device is down for a moment
                continue
            if len(waiting) < _WAITING_MAX:
                waiting.append((time.monotonic() + delay_s, target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            try:
                target.send(frame)
            except OSError:  # lost, as on a wire
                continue


if __name__ == "__main__":
    main()
