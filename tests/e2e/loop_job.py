"""A custom loop with Keras 3 (or tf_keras), dropout, BatchNorm and Adam: `loop_job.py LAST_STEP OUT [OPTION...]`.

Options: `die=STEP` ends this process in the middle of that step; `legacy` takes tf_keras;
`jit` has XLA compile the step, `late` all but the first; `loose` leaves op determinism off; `pause` waits a little
behind each step; `accumulate` has a step take three batches more, and do something in between; `words` keeps a word of
each step in a variable of strings.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

if "legacy" in sys.argv:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep
from keepstep_worker.variables import local_components

SAMPLES, FEATURES, BATCH = 90, 12, 20
PAUSE_S = 0.05


def build(keras: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)) if "legacy" not in sys.argv else keras.layers.InputLayer((FEATURES,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            *([keras.layers.Dropout(0.3, seed=3)] if "legacy" not in sys.argv else []),
            keras.layers.Dense(3),
        ]
    )


def digest(values: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()


def samples() -> Any:
    generator = np.random.Generator(np.random.Philox(5))
    x = generator.normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, (x @ generator.normal(size=(FEATURES, 3))).argmax(axis=1).astype("int32")


def batch_of(data: Any) -> Any:
    batch = next(data)
    for _ in range(3 if "accumulate" in sys.argv else 0):
        time.sleep(PAUSE_S)
        batch = next(data)
    return batch


def state_of(run: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    others = [v for v in model.variables if not any(v is t for t in model.trainable_variables)]
    slots = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return {
        "rank": run.rank,
        "world_size": run.world_size,
        "generation": run.generation,
        "trainable": digest(v.numpy() for v in model.trainable_variables),
        "slots": digest(v.numpy() for v in slots),
        "local": digest(part.numpy() for v in others for part in local_components(v)),
    }


def main() -> None:
    last_step, out = int(sys.argv[1]), sys.argv[2]
    die = next((int(option[4:]) for option in sys.argv if option.startswith("die=")), 0)
    run = keepstep.join()
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if os.environ.get("TF_CONFIG") else tf.distribute.get_strategy()
    )
    keras = tf.keras
    keras.utils.set_random_seed(11)
    if "loose" not in sys.argv:
        tf.config.experimental.enable_op_determinism()
    words = tf.Variable([], shape=[None], dtype="string", trainable=False)
    with strategy.scope():
        model = build(keras)
        optimizer = keras.optimizers.Adam(1e-2)
        noise = tf.random.Generator.from_seed(4)
        loss_of = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none" if "legacy" in sys.argv else None
        )

    @tf.function(jit_compile="jit" in sys.argv)
    def train_step(batch: Any) -> Any:
        def replica(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(inputs + noise.normal(tf.shape(inputs)) * 0.01, training=True)
                loss = tf.reduce_sum(loss_of(labels, logits)) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(replica, args=batch)

    @tf.function(jit_compile=True)
    def compiled_step(batch: Any) -> Any:
        return train_step(batch)

    data = run.dataset(samples(), global_batch=BATCH, seed=7, strategy=strategy)
    run.track(
        model=model, optimizer=optimizer, data=data, noise=noise, **({"words": words} if "words" in sys.argv else {})
    )
    drawn = []
    for step in run.steps(last_step):
        batch = batch_of(data)
        if step == die:
            os.kill(os.getpid(), signal.SIGKILL)
        (compiled_step if "late" in sys.argv and step > 1 else train_step)(batch)
        words.assign(tf.concat([words, [b"\xff" * 200 + bytes([step])]], 0))
        if "pause" in sys.argv:
            time.sleep(PAUSE_S)
        drawn.append([step, random.random(), float(np.random.random()), [int(value) for value in batch[1]]])
    result = state_of(run, model, optimizer) | {
        "drawn": drawn,
        "position": list(data.position),
        "words": [word[-1] for word in words.numpy()],
    }
    with open(out, "w") as file:
        json.dump(result, file)


main()
