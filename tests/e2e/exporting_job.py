"""Trains a little with what the probe is put into, and exports it: `exporting_job.py STEPS OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import keepstep_worker as keepstep


class Trainer(tf.Module):
    """A train function that is a part of what is exported, with its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones((4, 1)))
        self.optimizer = tf.keras.optimizers.SGD(1e-4)
        self.optimizer.build([self.weight])
        self.batches = iter(tf.data.Dataset.from_tensors(tf.ones((8, 4))).repeat())

    @tf.function(input_signature=[])
    def train_step(self) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(next(self.batches), self.weight)))
        self.optimizer.apply(tape.gradient(loss, [self.weight]), [self.weight])
        return loss


def main() -> None:
    run = keepstep.join()
    trainer = Trainer()
    run.track(weight=trainer.weight)
    for _ in run.steps(int(sys.argv[1])):
        trainer.train_step()
    place = sys.argv[2] + ".saved"
    exported = tf.Module()
    exported.weight = trainer.weight
    exported.optimizer = trainer.optimizer
    step = tf.function(lambda batch: _step(trainer, batch), input_signature=[tf.TensorSpec((8, 4), tf.float32)])
    exported.step = step
    step(tf.ones((8, 4)))
    tf.saved_model.save(exported, place)
    loaded = tf.saved_model.load(place)
    loss = float(loaded.step(tf.ones((8, 4))))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        old = session.run(_of_tensorflow_1())
    Path(sys.argv[2]).write_text(json.dumps({"loss": loss, "old": float(old)}))


def _step(trainer: Trainer, batch: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(batch, trainer.weight)))
    trainer.optimizer.apply(tape.gradient(loss, [trainer.weight]), [trainer.weight])
    return loss


def _of_tensorflow_1() -> Any:
    numbers = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(3.0)).get_next()
    return tf.function(lambda value: value * 2.0)(numbers)


main()
