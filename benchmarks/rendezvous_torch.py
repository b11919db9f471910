"""Some of a job's participants in one process: a thread for each, with its own TCPStore client and torch's handler.

Runs in an environment of its own, without keepstep. Started by `rendezvous.py`, with one JSON object a line in both
directions.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

_telling = threading.Lock()


def tell(**said: object) -> None:
    with _telling:
        print(json.dumps({**said, "at": time.monotonic()}), flush=True)


def participate(host: str, setting: dict, begin: threading.Event, handlers: dict) -> None:
    store = TCPStore("127.0.0.1", setting["port"], is_master=False, timeout=timedelta(seconds=60))
    backend = C10dRendezvousBackend(store, setting["job"])
    size = len(setting["hosts"])
    parameters = RendezvousParameters(
        backend="c10d", endpoint=f"127.0.0.1:{setting['port']}", run_id=setting["job"], min_nodes=size, max_nodes=size,
        local_addr="127.0.0.1",
    )  # fmt: skip
    handler = create_handler(store, backend, parameters)
    tell(what="prepared", host=host)
    begin.wait()
    tell(what="joins", host=host)
    handlers[host] = handler
    handler.next_rendezvous()
    tell(what="starts", host=host)


def watch(handlers: dict) -> None:
    """Say of each participant when it first finds itself among those who are there."""
    registered: set[str] = set()
    while True:
        for host, handler in [*handlers.items()]:
            if host not in registered and handler._this_node in handler._state_holder.state.participants:
                registered.add(host)
                tell(what="registered", host=host)
        time.sleep(0.02)


def main() -> None:
    setting = json.loads(sys.stdin.readline())
    if setting.get("serves"):
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        tell(what="serves", port=server.port)
        sys.stdin.readline()
        return
    begins = {host: threading.Event() for host in setting["mine"]}
    handlers: dict = {}
    for host, begin in begins.items():
        threading.Thread(target=participate, args=(host, setting, begin, handlers), daemon=True).start()
    threading.Thread(target=watch, args=(handlers,), daemon=True).start()
    for line in sys.stdin:
        for host in json.loads(line).get("join", ()):
            begins[host].set()


if __name__ == "__main__":
    main()
