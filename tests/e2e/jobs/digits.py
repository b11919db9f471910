"""A custom loop on the handwritten digits: `digits.py --out FOLDER [--steps N] [--pause SECONDS]`, on several hosts.

Keras 3 with dropout, BatchNorm and Adam, shuffled data, all seeded and deterministic. Writes this rank's final
variables to FOLDER/RANK.npz, and for each step it has executed, first or again, which samples it took to
FOLDER/taken-RANK.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep

sys.path.insert(0, str(Path(__file__).parent))
from common import build_model, final_variables, keras

DATA = Path(__file__).resolve().parents[3] / "examples" / "digits.csv.gz"
BATCH, CLASSES = 64, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each step takes longer")
    args = parser.parse_args()
    rows = np.loadtxt(DATA, dtype="int32", delimiter=",")
    images, labels = (rows[:, :-1] / 16).astype("float32"), rows[:, -1]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(11)
    tf.config.experimental.enable_op_determinism()
    with strategy.scope():
        model = build_model(images.shape[1], CLASSES)
        model.build((None, images.shape[1]))
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function(reduce_retracing=True)
    def train_step(batch: Any) -> Any:
        def replica(inputs: Any, labels: Any, numbers: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(labels, model(inputs, training=True))) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(replica, args=batch)

    run = keepstep.join()
    samples = (images, labels, np.arange(len(images)))
    data = run.dataset(samples, global_batch=BATCH, seed=7, strategy=strategy)
    run.track(model=model, optimizer=optimizer, data=data)
    with (args.out / f"taken-{run.rank}.jsonl").open("a") as taken:
        for step in run.steps(args.steps):
            batch = next(data)
            (numbers,) = strategy.experimental_local_results(batch[2])
            taken.write(json.dumps([step, [int(number) for number in numbers]]) + "\n")
            taken.flush()
            train_step(batch)
            time.sleep(args.pause)
    np.savez(args.out / f"{run.rank}.npz", position=np.array(data.position), **final_variables(model, optimizer))


if __name__ == "__main__":
    main()
