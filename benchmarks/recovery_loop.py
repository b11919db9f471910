"""What people do without a supervisor: start two workers, and when one has ended kill the other and start both again.

`recovery_loop.py PYTHON SCRIPT ARGUMENTS...`; ends with SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start(command: list[str]) -> list[subprocess.Popen[bytes]]:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    workers = []
    for index in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        workers.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config}))
    return workers


def main() -> None:
    workers: list[subprocess.Popen[bytes]] = []

    def end(*_: Any) -> None:
        for worker in workers:
            worker.kill()
        os._exit(143)

    signal.signal(signal.SIGTERM, end)
    while True:
        workers[:] = start(sys.argv[1:])
        os.wait()  # whichever ends first
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()
