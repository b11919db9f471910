"""What restore.py measures: how long it takes until a state of many variables is assigned, in a process just started.

`keepstep` runs under a real agent, dies after each restoration and goes on in the next process; `write` leaves a
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


def note(path: Path, seconds: float) -> int:
    """Add a line; how many there are now."""
    with path.open("a") as file:
        file.write(f"{seconds}\n")
    return len(path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("keepstep", "write", "read"), required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--times", type=int, default=1)
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
        seconds, started = time.perf_counter() - begun, run.step
        is_last = started > 0 and note(options.result, seconds) >= options.times
        for _ in run.steps(started + 1 if is_last else 1 << 30):
            state.step().numpy()
            if session is not None and session.snapshot_ns:  # there is a seal by now
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
