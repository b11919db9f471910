"""What restore.py measures: how long it takes until a state of many variables is assigned, in a process just started.

`keepstep` runs under a real agent, dies once there is a snapshot and goes on in the next process; `write` leaves a
checkpoint of TensorFlow's own, and `read` reads it back. Appends the seconds to a file, a line each.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).parent))

import tensorflow as tf
from snapshot_job import State

import keepstep_worker as keepstep
from keepstep_worker.session import Session


def note(path: Path, seconds: float) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(f"{seconds}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("keepstep", "write", "read"), required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    state = State(options.bytes)
    if options.mode == "write":
        tf.train.Checkpoint(state=state).write(str(options.checkpoint))
    elif options.mode == "read":
        begun = time.perf_counter()
        tf.train.Checkpoint(state=state).read(str(options.checkpoint)).assert_consumed()
        note(options.result, time.perf_counter() - begun)
    else:
        run, session = keepstep.join(), Session.current()
        begun = time.perf_counter()
        run.track(state=state)
        seconds, restored = time.perf_counter() - begun, run.step
        if restored:
            note(options.result, seconds)
        for _ in run.steps(restored + 1 if restored else 1 << 30):
            state.step().numpy()
            if session is not None and session.snapshot_ns and not restored:  # there is a seal by now
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
