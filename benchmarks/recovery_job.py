"""The training that recovery.py kills: two workers with MultiWorkerMirroredStrategy and a state of so many bytes.

`keepstep` goes on from keepstep's slabs; `plain` is what a script does by itself: a CheckpointManager's checkpoints in
memory, every so many steps. Each rank adds a line to its file after each step: pid, step, second of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import keepstep_worker as keepstep

VARIABLES = 48
"""Beside each two slots, as with Adam."""


class State(tf.Module):
    """Weights with two slots each, of which a step changes a few; a matrix whose products make it take its time."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        count = max(1, size_bytes // (4 * 3 * VARIABLES))
        names = ("weight", "first", "second")
        self.slots = [[tf.Variable(tf.zeros((count,)), name=f"{name}_{n}") for name in names] for n in range(VARIABLES)]
        self.matrix = tf.Variable(tf.random.stateless_normal((256, 256), (1, 2)), trainable=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("keepstep", "plain"), required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between the checkpoints of `plain`")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step", type=float, default=0.0, help="seconds that a step takes at the least")
    options = parser.parse_args()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        state = State(options.bytes)

    @tf.function
    def train_step() -> Any:
        def replica() -> Any:
            product = state.matrix
            for _ in range(4):
                product = tf.linalg.matmul(product, state.matrix) * 1e-3
            gradient = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_mean(product))
            for weight, first, second in state.slots[:2]:
                first.assign(0.9 * first + 0.1 * gradient)
                second.assign(0.999 * second + 0.001 * gradient * gradient)
                weight.assign_sub(1e-3 * first / (tf.sqrt(second) + 1e-7))
            return gradient

        return strategy.run(replica)

    with (options.folder / f"steps-{rank}").open("a", buffering=1) as told:
        for step in steps(options, state, rank):
            began = time.monotonic()
            train_step()
            time.sleep(max(0.0, began + options.step - time.monotonic()))
            told.write(f"{os.getpid()} {step} {time.monotonic()}\n")


def steps(options: argparse.Namespace, state: State, rank: int) -> Any:
    """The steps from where the state is, without end."""
    if options.mode == "keepstep":
        run = keepstep.join()
        run.track(state=state)
        yield from run.steps(1 << 30)
        return
    at = tf.Variable(0, dtype=tf.int64, trainable=False)
    folder = options.folder / f"checkpoints-{rank}"  # all ranks take part in writing, only the first one's count
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(state=state, step=at), str(folder), max_to_keep=2)
    newest = tf.train.latest_checkpoint(str(options.folder / "checkpoints-0"))
    if newest is not None:
        manager.checkpoint.restore(newest).assert_existing_objects_matched()
    while True:
        yield int(at) + 1
        at.assign_add(1)
        if int(at) % options.every == 0:
            manager.save(checkpoint_number=at)


if __name__ == "__main__":
    main()
