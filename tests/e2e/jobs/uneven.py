"""`fit` that takes its time, and never hangs: `uneven.py --out FOLDER [--epochs N]`, on any number of hosts.

Batches that come late, the first of an epoch latest; steps that rest afterwards; long batches of an evaluation; and a
checkpoint that rank 0 alone writes, slowly, while the others wait. All is drawn, by each rank for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH, STEPS, EVALUATIONS = 16, 20, 4
FIRST_BATCH_S, BATCH_S, REST_S, EVALUATION_S, SAVE_S = 4.0, 1.8, 1.8, 4.0, 12.0
"""The longest that each may take."""


class Slow(keras.callbacks.Callback):
    """Rests after steps, evaluates for long, and writes the model slowly on rank 0."""

    def __init__(self, draw: np.random.Generator, saves_to: Path | None) -> None:
        super().__init__()
        self.draw, self.saves_to = draw, saves_to

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(moment(self.draw, REST_S))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.draw.uniform(0, EVALUATION_S))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.saves_to is not None:
            self.model.save_weights(self.saves_to)
            time.sleep(self.draw.uniform(0, SAVE_S))


def moment(draw: np.random.Generator, longest_s: float) -> float:
    """Mostly a tenth of a second, now and then as much as may be."""
    return min(longest_s, 0.1 * float(draw.lognormal(0.0, 1.2)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    several = bool(os.environ.get("TF_CONFIG"))
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if several else 0
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    draw = np.random.default_rng(rank)
    x = draw.normal(size=(STEPS, BATCH, 12)).astype("float32")

    def load(number: Any) -> Any:
        first = int(number) == 0
        time.sleep(draw.uniform(0, FIRST_BATCH_S) if first else moment(draw, BATCH_S))
        return x[int(number)]

    def batch(number: Any) -> tuple[Any, Any]:
        features = tf.ensure_shape(tf.py_function(load, [number], tf.float32), (BATCH, 12))
        return features, tf.argmax(features[:, :3], axis=1)

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = (
        False  # its thread may sleep on for a minute where an iterator goes, and `fit` with it (2.21)
    )
    data = tf.data.Dataset.range(STEPS).map(batch).with_options(options)
    held_out = tf.data.Dataset.from_tensors((x[0], np.argmax(x[0][:, :3], axis=1))).repeat(EVALUATIONS)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(24, "relu"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
    saves_to = args.out / "own.weights.h5" if rank == 0 else None
    held_out = held_out.with_options(options)
    model.fit(data, epochs=args.epochs, validation_data=held_out, callbacks=[Slow(draw, saves_to)], verbose=2)


if __name__ == "__main__":
    main()
