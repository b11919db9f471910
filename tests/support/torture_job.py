"""A training whose state is known at every step: `torture_job.py FOLDER BYTES PAUSE_S`, on any number of hosts.

Without TensorFlow, in lockstep, until FOLDER/enough exists. Each tensor's bytes follow from its name and the step, so
that who restores can tell whether all of them are those of one step. What was found then each rank adds as a line to
FOLDER/restored-RANK.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from keepstep_worker.session import Session
from keepstep_worker.slab import Tensor, fill
from tests.support.lockstep_job import Ring

_BLOCK = 65_521  # prime: bytes that landed elsewhere are no multiple of it away


def expected(key: str, step: int, size_bytes: int) -> bytes:
    """What a tensor holds once a step is completed."""
    block = hashlib.shake_128(f"{key} after step {step}".encode()).digest(min(_BLOCK, size_bytes))
    return (block * (size_bytes // len(block) + 1))[:size_bytes] if size_bytes else b""


def sizes(state_bytes: int, rank: int) -> dict[str, int]:
    """Length of each tensor in bytes; a rank's own have its number in their name."""
    return {
        "replicated/large": state_bytes,
        "replicated/small": 7,
        "replicated/empty": 0,
        f"local/own-{rank}": 5_000 + rank,
    }


def main() -> None:
    folder, state_bytes, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    session = Session.current()
    assert session is not None, "to be run by keepstep"
    rank = session.identity.rank
    lengths = sizes(state_bytes, rank)
    step = 0
    view = session.restored()
    if view is not None:
        step = int.from_bytes(view.raw("replicated/step"), "little")
        wrong = [key for key, size in lengths.items() if bytes(view.raw(key)) != expected(key, step, size)]
        with (folder / f"restored-{rank}.jsonl").open("a") as file:
            found = {"generation": session.identity.generation, "step": step, "wrong": wrong}
            file.write(json.dumps(found) + "\n")
        session.restoration_done(step)

    def tensor(key: str, size: int) -> Tensor:
        return Tensor(key, "U8", (size,), lambda target: fill(target, expected(key, step, size)))

    session.set_provider(
        lambda: [
            Tensor("replicated/step", "I64", (), lambda target: fill(target, step.to_bytes(8, "little"))),
            *(tensor(key, size) for key, size in lengths.items()),
        ]
    )
    ring = Ring()
    session.join("loop")
    while not (folder / "enough").exists():
        session.enter_step(step + 1)
        ring.meet()
        time.sleep(pause_s)
        step += 1
        session.complete_step(step)
    session.finish()


if __name__ == "__main__":
    main()
