"""Train a small network on the UCI handwritten digits, on one host or on several.

digits.csv.gz holds the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, CC BY 4.0): 1,797 images, in each line 64 grey levels of 0 to 16 and the digit. With TF_CONFIG set,
every host runs this script and takes its part of each global batch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

DATA = Path(__file__).with_name("digits.csv.gz")
TRAIN, VALIDATION, TEST = 1280, 192, 320  # whole batches of 64 and of 32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--batch", type=int, default=64, help="samples in a step, over all hosts")
    parser.add_argument("--units", type=int, default=256, help="width of the first layer; the second has half of it")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def load_splits() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return training, validation and test data, each as images in 0..1 and labels, always in the same order."""
    rows = np.random.default_rng(0).permutation(np.loadtxt(DATA, dtype="int32", delimiter=","))
    images, labels = (rows[:, :-1] / 16).astype("float32"), rows[:, -1]
    cuts = np.cumsum([TRAIN, VALIDATION, TEST])
    return list(zip(np.split(images, cuts)[:3], np.split(labels, cuts)[:3], strict=True))


def batches(data: tuple[np.ndarray, np.ndarray], batch: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices(data).batch(batch, drop_remainder=True).with_options(options)


def build_model(units: int, learning_rate: float) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(units // 2, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    args = parse_arguments()
    # the strategy comes first: it starts the servers that the hosts talk through
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if os.environ.get("TF_CONFIG") else tf.distribute.get_strategy()
    )
    keras.utils.set_random_seed(args.seed)
    train, validation, test = (batches(data, args.batch) for data in load_splits())
    with strategy.scope():
        model = build_model(args.units, args.learning_rate)
    model.fit(train, epochs=args.epochs, validation_data=validation, verbose=2)
    _, accuracy = model.evaluate(test, verbose=0)
    print(f"final_accuracy={accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
