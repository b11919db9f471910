"""A custom loop full of what differs from rank to rank: `normed.py --out FOLDER`; trains until it is interrupted.

BatchNorm after each layer, metrics, and a generator that each rank seeds by itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import keepstep_worker as keepstep

sys.path.insert(0, str(Path(__file__).parent))
from common import FEATURES, make_data

BATCH, LAYERS = 16, 6


def build() -> Any:
    layers: list[Any] = [keras.Input((FEATURES,))]
    for _ in range(LAYERS):
        layers += [keras.layers.Dense(24, activation="relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    run = keepstep.join()
    metrics = [keras.metrics.Mean(name=f"mean_{number}") for number in range(3)]
    metrics += [keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseTopKCategoricalAccuracy(k=2)]
    generator = tf.random.Generator.from_seed(run.rank)

    @tf.function
    def train_step(batch: Any) -> Any:
        def replica(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                loss = tf.reduce_sum(loss_of(labels, logits)) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss, labels, logits

        return strategy.run(replica, args=batch)

    data = run.dataset(make_data(150), global_batch=BATCH, seed=7, strategy=strategy)
    named = {metric.name: metric for metric in metrics}
    run.track(model=model, optimizer=optimizer, data=data, generator=generator, **named)
    for _ in run.steps(10**9):
        loss, labels, logits = (strategy.experimental_local_results(each)[0] for each in train_step(next(data)))
        for metric in metrics[:3]:
            metric.update_state(loss + generator.normal([]))
        for metric in metrics[3:]:
            metric.update_state(labels, logits)


if __name__ == "__main__":
    main()
