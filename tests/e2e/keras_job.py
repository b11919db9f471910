"""A Keras 3 training small enough to run twice in a test: on two hosts with TF_CONFIG, in one process without.

Run by the user's interpreter. Writes history, predictions and variables (as hexadecimal bytes) to the JSON file that is
named last.
"""

from __future__ import annotations

import argparse
import json
import os

import keras
import numpy as np
import tensorflow as tf


def data(samples: int, batch: int, seed: int) -> tf.data.Dataset:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(samples, 12)).astype("float32")
    y = (x[:, :3].argmax(axis=1)).astype("int32")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).with_options(options)


def build(noisy: bool, lazy: bool) -> keras.Model:
    layers = [] if lazy else [keras.Input((12,))]
    layers.append(keras.layers.Dense(16, activation="relu"))
    if noisy:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repair", action="store_true")
    parser.add_argument("--noisy", action="store_true")
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("out")
    args = parser.parse_args()
    if args.repair:
        import keras.src.backend.tensorflow.trainer as trainer

        from keepstep_worker import keras3

        keras3.repair(trainer)
    several = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = build(args.noisy, args.lazy)
    train, held_out = data(256, 32, 1), data(64, 32, 2)
    histories = [model.fit(train, epochs=2, verbose=0).history]
    histories.append(model.fit(train, epochs=4, initial_epoch=2, validation_data=held_out, verbose=0).history)
    histories.append({"evaluate": model.evaluate(held_out, verbose=0)})
    variables = {"trainable": model.trainable_variables, "optimizer": model.optimizer.variables}
    variables["local"] = [getattr(v.value, "values", [v.value])[0] for v in model.non_trainable_variables]
    result = {
        "histories": histories,
        "predict": model.predict(held_out, verbose=0).tolist(),
        "variables": {name: [v.numpy().tobytes().hex() for v in group] for name, group in variables.items()},
        "weights": np.concatenate([v.numpy().ravel() for v in model.trainable_variables]).tolist(),
    }
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
