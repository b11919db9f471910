"""A custom loop on any number of hosts: `loop.py --out FOLDER [--steps N] [--pause SECONDS]`.

Dropout, BatchNorm and Adam, all seeded, and deterministic unless `--loose`. Writes this rank's final variables to
FOLDER/RANK.npz.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep
from keepstep_worker import snapshots

sys.path.insert(0, str(Path(__file__).parent))
from common import FEATURES, build_model, dawdle, final_variables, keras, make_data, pass_gate, source_of

BATCH, SAMPLES, SEED = 16, 150, 7


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each step takes longer")
    parser.add_argument("--poison", type=int, default=0, help="step whose batch has a sample that no step survives")
    parser.add_argument("--wrong", default="", help="host that computes one bit of its gradients wrong in each step")
    parser.add_argument("--wrong-once", default="", help="rank that does so in the first generation")
    parser.add_argument("--gate", help="see common.py")
    parser.add_argument("--loose", action="store_true", help="leave op determinism off, so that gradients can be timed")
    parser.add_argument("--source", default="arrays", choices=("arrays", "files", "records", "function"))
    parser.add_argument("--stuck", type=int, default=0, help="step whose part of rank 1 never ends, once")
    parser.add_argument("--spoil", type=int, default=0, help="step that leaves NaN in the first generation")
    parser.add_argument("--late", action="store_true", help="make a variable in the first step")
    parser.add_argument("--flip", nargs=3, help="RANK STEP TENSOR: one bit is wrong in what that rank saves since")
    parser.add_argument("--wide", type=int, default=0, help="see common.py; FOLDER/beside-RANK: snapshots copied so")
    return parser.parse_args()


def main() -> None:
    args = read_options()
    several = bool(os.environ.get("TF_CONFIG"))
    once = os.environ.get("KEEPSTEP_GENERATION") == "1" and os.environ.get("KEEPSTEP_RANK") == args.wrong_once
    is_wrong = once or os.environ.get("SM_CURRENT_HOST") == args.wrong
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    keras.utils.set_random_seed(11)
    if not args.loose:
        tf.config.experimental.enable_op_determinism()
    with strategy.scope():
        model = build_model(wide=args.wide)
        model.build((None, FEATURES))
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    never = tf.queue.FIFOQueue(1, tf.float32) if args.stuck else None

    @tf.function
    def train_step(batch: Any, is_stuck: Any = False) -> Any:
        def replica(inputs: Any, labels: Any) -> Any:
            if never is not None:
                with tf.control_dependencies([tf.cond(is_stuck, never.dequeue, lambda: 0.0)]):
                    inputs = tf.identity(inputs)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(labels, model(inputs, training=True))) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            if is_wrong:
                wrong = tf.bitwise.bitwise_xor(tf.bitcast(gradients[0], tf.int32), 1)
                gradients[0] = tf.bitcast(wrong, tf.float32)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(replica, args=batch)

    beside = count_copies()
    run = keepstep.join()
    if args.flip and run.rank == int(args.flip[0]):
        flip(int(args.flip[1]), args.flip[2])
    x, y = make_data(SAMPLES)
    if args.poison:
        order = np.random.Generator(np.random.Philox(key=[SEED, 0])).permutation(SAMPLES)
        x[order[(args.poison - 1) * BATCH]] = np.nan
    source = source_of(args.source, x, y, args.out / f"data-{run.rank}-{run.generation}")
    data = run.dataset(source, global_batch=BATCH, seed=SEED, strategy=strategy)
    run.track(model=model, optimizer=optimizer, data=data)
    stuck_at = args.stuck * (os.environ.get("KEEPSTEP_GENERATION") == "1" and run.rank == 1)
    if stuck_at:
        threading.Thread(target=live, daemon=True).start()
    for step in run.steps(args.steps):
        batch = next(data)
        if args.poison and np.isnan(batch[0].numpy()).any():
            raise ValueError("a sample is broken")
        train_step(batch, *[tf.constant(step == stuck_at)] * bool(args.stuck))
        spoil(args, model, run.generation, step)
        dawdle(args.pause)
        pass_gate(step)
    np.savez(args.out / f"{run.rank}.npz", position=np.array(data.position), **final_variables(model, optimizer))
    if args.wide:
        (args.out / f"beside-{run.rank}").write_text(str(len(beside)))


def spoil(args: argparse.Namespace, model: Any, generation: int, step: int) -> None:
    if args.spoil == step and generation == 1:
        kernel = model.trainable_variables[0]
        kernel.assign(kernel * float("nan"))
    if args.late and step == 1:
        model.late = keras.Variable(np.zeros(3, "float32"), name="late")


def flip(since: int, key: str) -> None:
    """Have one bit of a tensor be wrong in the slab, not where it is trained."""
    original = snapshots.Slabs.seal

    def seal(self: Any, slab: int, tensors: Any, step: int, left_bytes: int = 0) -> None:
        wrong = [wrongly(tensor) if tensor.key == key and step >= since else tensor for tensor in tensors]
        original(self, slab, wrong, step, left_bytes)

    def wrongly(tensor: Any) -> Any:
        def write(target: memoryview) -> None:
            tensor.write(target)
            target[len(target) // 2] ^= 1

        return tensor._replace(reader=None, write=write)

    snapshots.Slabs.seal = seal  # type: ignore[method-assign]


def live() -> None:
    """What a script's other threads do is no sign of its training."""
    while True:
        print("this thread is well", flush=True)
        time.sleep(0.1)


def count_copies() -> list[int]:
    """Returns the steps of which snapshots leave something to be copied while the training goes on."""
    steps: list[int] = []
    original = snapshots.Slabs.seal

    def seal(self: Any, slab: int, tensors: Any, step: int, left_bytes: int = 0) -> None:
        original(self, slab, tensors, step, left_bytes)
        if self.copying:
            steps.append(step)

    snapshots.Slabs.seal = seal  # type: ignore[method-assign]
    return steps


if __name__ == "__main__":
    main()
