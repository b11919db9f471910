"""A training without TensorFlow: `lockstep_job.py FOLDER LAST_STEP [PAUSE_S [RANK]]`, on any number of hosts.

The workers wait for each other in each step, over the network, as an all-reduce does: who loses a peer ends with an
error, who does not hear of one waits. What is trained is a sum over steps, so lost or doubled steps can be told. Rank 0
writes it to FOLDER/result.json at the end, with the world's size. Once something is committed to FOLDER/store, one bit
is wrong in what RANK saves of it, from the step on that it writes to FOLDER/wrong_from.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from keepstep_worker.session import Session
from keepstep_worker.slab import Tensor, fill

_ANSWER = b"+"


class Ring:
    """All ranks, joined through rank 0."""

    def __init__(self) -> None:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, self.rank = config["cluster"]["worker"], config["task"]["index"]
        host, _, port = workers[0].rpartition(":")
        self.others: list[socket.socket] = []
        if self.rank == 0:
            with socket.create_server(("", int(port)), backlog=len(workers)) as server:
                self.others = [server.accept()[0] for _ in workers[1:]]
        else:
            self.others = [self._connect(host, int(port))]
        for other in self.others:
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, host: str, port: int) -> socket.socket:
        while True:
            try:
                return socket.create_connection((host, port))
            except ConnectionRefusedError:
                time.sleep(0.02)

    def meet(self) -> None:
        """Return once everybody is here."""
        if self.rank == 0:
            self._hear()
            self._say()
        else:
            self._say()
            self._hear()

    def _hear(self) -> None:
        for other in self.others:
            if other.recv(1) != _ANSWER:
                raise ConnectionError("a peer has gone")

    def _say(self) -> None:
        for other in self.others:
            other.sendall(_ANSWER)


def is_committed(folder: Path) -> bool:
    return any(json.loads(head.read_text())["step"] for head in folder.glob("store/*/HEAD.json"))


def main() -> None:
    folder, last_step = Path(sys.argv[1]), int(sys.argv[2])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01
    corrupt_rank, wrong_from = int(sys.argv[4]) if len(sys.argv) > 4 else -1, 0
    session = Session.current()
    assert session is not None, "to be run by keepstep"
    step = total = 0
    view = session.restored()
    if view is not None:
        step = int.from_bytes(view.raw("replicated/step"), "little")
        total = int.from_bytes(view.raw("replicated/total"), "little")
        session.restoration_done(step)

    def saved_total() -> bytes:
        return (total ^ (1 << 20 if wrong_from else 0)).to_bytes(8, "little")

    session.set_provider(
        lambda: [
            Tensor("replicated/step", "I64", (), lambda target: fill(target, step.to_bytes(8, "little"))),
            Tensor("replicated/total", "I64", (), lambda target: fill(target, saved_total())),
        ]
    )
    ring = Ring()
    session.join("loop", last_step)
    while step < last_step:
        session.enter_step(step + 1)
        ring.meet()
        time.sleep(pause_s)
        step, total = step + 1, total + step + 1
        if session.identity.rank == corrupt_rank and not wrong_from and is_committed(folder):
            wrong_from = step
            (folder / "wrong_from").write_text(str(step))
        session.complete_step(step)
    session.finish()
    if ring.rank == 0:
        result = {"total": total, "world_size": session.identity.world_size}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
