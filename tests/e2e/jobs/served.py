"""ParameterServerStrategy as TensorFlow's guide has it: `served.py --out FOLDER [--epochs N] [--steps N]`.

The chief counts upon a variable of the parameter servers, in so many steps an epoch, and saves after each epoch. It
knows nothing of keepstep. An evaluator writes OUT/evaluated: its pid and the epoch, for each checkpoint it has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import NoReturn

import tensorflow as tf


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="of an epoch")
    parser.add_argument("--gate", type=Path, help="a file without which the last epoch does not begin")
    args = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
    if resolver.task_type == "evaluator":
        evaluate(args.out)
    train(tf.distribute.ParameterServerStrategy(resolver), args)


def checkpoints() -> Path:
    return Path(os.environ["SM_OUTPUT_DATA_DIR"]).parents[1] / "checkpoints"


def evaluate(out: Path) -> NoReturn:
    """Say of each checkpoint which epoch it holds, until somebody ends this."""
    epoch, seen = tf.Variable(0, dtype=tf.int64), None
    while True:
        newest = tf.train.latest_checkpoint(str(checkpoints()))
        if newest is not None and newest != seen:
            seen = newest
            tf.train.Checkpoint(epoch=epoch).restore(newest).expect_partial()
            with (out / "evaluated").open("a") as file:
                file.write(f"{os.getpid()} {int(epoch.numpy())}\n")
        time.sleep(0.1)


def train(strategy: tf.distribute.ParameterServerStrategy, args: argparse.Namespace) -> None:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        count, epoch = tf.Variable(0, dtype=tf.int64), tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step() -> None:
        for _ in tf.range(200):  # a step takes its time
            tf.linalg.matmul(tf.random.normal((64, 64)), tf.random.normal((64, 64)))
        count.assign_add(1)

    # the chief writes and reads all of it: each parameter server would write its part on its own host
    here = tf.train.CheckpointOptions(experimental_io_device="/job:chief/replica:0/task:0/device:CPU:0")
    checkpoint = tf.train.Checkpoint(count=count, epoch=epoch)
    manager = tf.train.CheckpointManager(checkpoint, str(checkpoints()), max_to_keep=3)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint, options=here)
    with (args.out / "started.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": int(epoch.numpy()), "count": int(count.numpy())}) + "\n")
    while epoch.numpy() < args.epochs:
        while args.gate is not None and epoch.numpy() == args.epochs - 1 and not args.gate.exists():
            time.sleep(0.05)
        for _ in range(args.steps):
            coordinator.schedule(step)
        coordinator.join()
        epoch.assign_add(1)
        manager.save(options=here)
        (args.out / "epoch").write_text(str(int(epoch.numpy())))
        time.sleep(0.5)
    (args.out / "done.json").write_text(json.dumps({"count": int(count.numpy())}))


if __name__ == "__main__":
    main()
