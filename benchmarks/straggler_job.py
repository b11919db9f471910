"""The training that straggler.py slows down: two ranks, each with one thread on a core of its own.

`FOLDER/data-RANK`, where it is there, has the seconds that it takes to read each batch of that rank. It trains by a
loop of its own, by `Model.fit` (`--how fit`, of tf_keras `--how legacy`), or by a loop whose batches `run.dataset`
divides (`--how divided`). The pid of each rank lies in `FOLDER/pid-RANK`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

WIDTH, SAMPLES, LAYERS = 256, 4096, 4
BATCHES = 1 << 20


def pin() -> int:
    """Take one core, by rank, and return the rank."""
    rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return rank


def late(path: Path) -> Any:
    """What keeps a batch, where somebody wants it to be late: a disk that gives one at a time."""
    disk = threading.Lock()

    def wait() -> int:
        try:
            with disk:
                time.sleep(float(path.read_text()))
        except (OSError, ValueError):
            return 0
        return 1

    return wait


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--how", choices=("loop", "fit", "legacy", "divided"), default="loop")
    options = parser.parse_args()
    rank = pin()
    if options.how == "legacy":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"

    import tensorflow as tf

    keras = tf.keras

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    (options.folder / f"pid-{rank}").write_text(str(os.getpid()))
    wait = late(options.folder / f"data-{rank}")

    def batches(context: Any = None) -> Any:
        inputs = tf.random.stateless_normal((SAMPLES, WIDTH), (1, rank))
        labels = tf.reduce_sum(inputs, axis=1, keepdims=True)

        def batch(number: Any) -> Any:
            kept = tf.cast(tf.numpy_function(wait, (), tf.int64), tf.float32) * 0.0
            return tf.ensure_shape(inputs + kept, inputs.shape), labels

        return tf.data.Dataset.range(BATCHES).map(batch)

    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1e-4)
        model.compile(optimizer=optimizer, loss="mse")
    if options.how in ("fit", "legacy"):
        fed = tf.data.Options()
        fed.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        model.fit(batches().with_options(fed), epochs=1, steps_per_epoch=BATCHES, verbose=0)
        return
    loop(strategy, model, optimizer, None if options.how == "divided" else batches)


def loop(strategy: Any, model: Any, optimizer: Any, batches: Any) -> None:
    """Train for ever; without batches of its own, on those that `run.dataset` divides."""
    import tensorflow as tf

    import keepstep_worker as keepstep

    run = keepstep.join()
    if batches is None:
        inputs = tf.random.stateless_normal((2 * SAMPLES, WIDTH), (1, 0)).numpy()
        source = (inputs, inputs.sum(axis=1, keepdims=True))
        data = run.dataset(source, global_batch=2 * SAMPLES, shuffle=False, strategy=strategy)
        run.track(model=model, optimizer=optimizer, data=data)
    else:
        run.track(model=model, optimizer=optimizer)
        data = iter(strategy.distribute_datasets_from_function(batches))

    @tf.function(reduce_retracing=True)
    def train_step(batch: Any) -> Any:
        def replica(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs, training=True) - labels)) / 2
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(replica, args=batch)

    for _ in run.steps(sys.maxsize):
        train_step(next(data))


if __name__ == "__main__":
    main()
