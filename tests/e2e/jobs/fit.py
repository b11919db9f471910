"""`fit` on any number of hosts, as a user writes it: `fit.py --out FOLDER [--epochs N] [--pause SECONDS]`.

Dropout, BatchNorm and Adam, data unshuffled or with `--shuffle`, or a `PyDataset` with `--sequence`, all seeded and
deterministic; Keras 3, or with `--legacy` tf_keras, and no dropout. Writes this rank's final variables to
FOLDER/RANK.npz.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))
from common import build_model, final_variables, keras, make_data, pass_gate

BATCH, TRAIN, HELD_OUT = 16, 640, 64  # 40 steps in an epoch


class Pace(keras.callbacks.Callback):
    """Makes each step and each validation batch take longer, and says when a validation begins."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.pause_s)
        pass_gate(int(self.model.optimizer.iterations.numpy()))

    def on_test_begin(self, logs: Any = None) -> None:
        print("validation begins", flush=True)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.pause_s)


def batches(x: np.ndarray, y: np.ndarray, shuffle: bool = False) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    samples = samples.shuffle(len(x), seed=9) if shuffle else samples
    return samples.batch(BATCH, drop_remainder=True).with_options(options)


class Sequence(getattr(keras.utils, "PyDataset", keras.utils.Sequence)):  # type: ignore[misc]
    """Shuffles its samples at each epoch's end; Keras shuffles the batches."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y, self.order = x, y, np.arange(len(x))

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        at = self.order[BATCH * index : BATCH * (index + 1)]
        return self.x[at], self.y[at]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--gate", help="see common.py")
    parser.add_argument("--loose", action="store_true", help="leave op determinism off, so that gradients can be timed")
    args = parser.parse_args()
    several = bool(os.environ.get("TF_CONFIG"))
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if several else 0
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    keras.utils.set_random_seed(11)
    if not args.loose:
        tf.config.experimental.enable_op_determinism()
    x, y = make_data(TRAIN + HELD_OUT)
    with strategy.scope():
        model = build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    train = x[:TRAIN], y[:TRAIN]
    history = model.fit(
        Sequence(*train) if args.sequence else batches(*train, args.shuffle),
        epochs=args.epochs,
        validation_data=batches(x[TRAIN:], y[TRAIN:]),
        callbacks=[Pace(args.pause)],
        verbose=2,
    )
    results = {f"history/{name}": np.array(values) for name, values in history.history.items()}
    np.savez(args.out / f"{rank}.npz", **results, **final_variables(model, model.optimizer))


if __name__ == "__main__":
    main()
