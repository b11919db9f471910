"""Trainings that go on in worlds of another size: `elastic_job.py loop LAST_STEP OUT`, or `fit EPOCHS OUT BATCH`.

The loop, with BatchNorm unless `plain` is said behind, seeds some of its generators by rank and some alike. BATCH is
the fit's global batch; with a `+` behind it a replica's. What is written to OUT is what was found on restoring, and
what was trained since.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep

SAMPLES, FEATURES, BATCH = 90, 4, 20
several = bool(os.environ.get("TF_CONFIG"))
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()


def samples() -> Any:
    x = np.random.Generator(np.random.Philox(5)).normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, x[:, 0].astype("float32"), np.arange(SAMPLES)


def numbers(variable: Any) -> list[float]:
    variable = getattr(variable, "_value", variable)
    return np.asarray(getattr(variable, "values", [variable])[0]).ravel().tolist()


def means_of(model: Any) -> list[float]:
    return [number for variable in model.non_trainable_variables for number in numbers(variable)]


def build() -> Any:
    with STRATEGY.scope():
        normalization = keras.layers.BatchNormalization() if "plain" not in sys.argv else keras.layers.Rescaling(1.0)
        return keras.Sequential([keras.Input((FEATURES,)), normalization, keras.layers.Dense(1)])


def loop(last_step: int) -> dict[str, Any]:
    run = keepstep.join()
    random.seed(7)  # the same on all ranks
    np.random.seed(run.rank)
    model = build()
    with STRATEGY.scope():
        optimizer = keras.optimizers.SGD(0.1)
        shared = tf.random.Generator.from_seed(4)
    noise = tf.random.Generator.from_seed(4 + run.rank)

    @tf.function
    def train_step(batch: Any) -> Any:
        def replica(x: Any, y: Any, _: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = run.scale_loss(tf.square(model(x, training=True)[:, 0] - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return STRATEGY.run(replica, args=batch)

    data = run.dataset(samples(), global_batch=BATCH, seed=7, strategy=STRATEGY)
    run.track(model=model, optimizer=optimizer, data=data, noise=noise, shared=shared)
    found = {
        "means": means_of(model),
        "noise": numbers(noise.state),
        "shared": numbers(shared.state),
        "python": random.random(),
        "numpy": float(np.random.random()),
    }
    taken = []
    for _ in run.steps(last_step):
        batch = next(data)
        train_step(batch)
        noise.normal((1,))
        taken.append(batch[2].numpy().tolist())
    final = {
        "means": means_of(model),
        "noise": numbers(noise.state),
        "shared": numbers(shared.state),
        "python": random.random(),
        "numpy": float(np.random.random()),
        "weights": [numbers(variable) for variable in model.trainable_variables],
    }
    world = [run.rank, run.world_size, run.full_world_size, run.learning_rate_scale, run.global_batch]
    return {"found": found, "taken": taken, "final": final, "world": world}


def fit(epochs: int, batch: str) -> dict[str, Any]:
    model, seen = build(), []
    with STRATEGY.scope():
        model.compile(keras.optimizers.SGD(0.01), "mse")

    class Batches(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([self.epoch, batch])

    size = int(batch.rstrip("+")) * (STRATEGY.num_replicas_in_sync if batch.endswith("+") else 1)
    x, y, _ = samples()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x[:72], y[:72])).batch(size, drop_remainder=True).with_options(options)
    model.fit(data, epochs=epochs, callbacks=[Batches()], verbose=0)
    return {"seen": seen, "means": means_of(model)}


def main() -> None:
    keras.utils.set_random_seed(11)
    tf.config.experimental.enable_op_determinism()
    mode, count, out, *rest = sys.argv[1:]
    result = loop(int(count)) if mode == "loop" else fit(int(count), *rest)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file, default=float)


main()
