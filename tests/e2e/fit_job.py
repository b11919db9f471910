"""Trainings of a user's script, one for each thing that `fit` can be asked for; small, seeded, and deterministic.

Run by the user's interpreter: flavour, names of cases with commas between, and the JSON file for all histories and all
variables (as hexadecimal bytes).
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

if sys.argv[1] == "keras3":
    import keras
else:
    import tf_keras as keras

several_hosts = "TF_CONFIG" in os.environ
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy() if several_hosts else tf.distribute.get_strategy()
DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(96, 12)).astype("float32")
Y = X[:, :3].argmax(axis=1).astype("int32")
HELD_OUT = X[:32], Y[:32]
NOISY = sys.argv[1] == "keras3"  # tf_keras's dropout keeps its state in the kernel, out of anybody's reach


class Losses(keras.callbacks.Callback):
    """A user's own callback: remembers every batch, and draws from NumPy's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.drawn = np.zeros(600)
        self.epochs = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))
        self.drawn[len(self.seen)] = np.random.rand()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1


def build(**options: Any) -> Any:
    """A model that knows the shape of its inputs, and so has its variables, only from the first batch on."""
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
    if NOISY:
        layers.append(keras.layers.Dropout(0.3))
    with STRATEGY.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = options.pop("optimizer", None) or keras.optimizers.Adam(0.02)
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def batches(size: int = 8) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def generated() -> tf.data.Dataset:
    """A dataset that does not know its size."""

    def rows() -> Any:
        for start in range(0, 80, 8):
            yield X[start : start + 8], Y[start : start + 8]
        pause("data_end")

    like = tf.TensorSpec((None, 12), tf.float32), tf.TensorSpec((None,), tf.int32)
    return tf.data.Dataset.from_generator(rows, output_signature=like)


def watched() -> tuple[list[Any], list[Any]]:
    model, losses = build(), Losses()
    watching = [
        keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0.1, patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.05),
        losses,
    ]
    fitted = model.fit(batches(), epochs=7, validation_data=HELD_OUT, callbacks=watching, verbose=0)
    return [model], [fitted.history, fitted.epoch, losses.seen, losses.drawn.tolist(), losses.epochs]


def several() -> tuple[list[Any], list[Any]]:
    """Three fits of two models, of which the script evaluates one in between."""
    model, losses = build(), Losses()
    first = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, callbacks=[losses], verbose=0)
    drawn = float(np.random.rand())
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.9)
    other = build(optimizer=keras.optimizers.SGD(schedule, momentum=0.9))
    second = other.fit(batches(), epochs=3, initial_epoch=1, steps_per_epoch=6, validation_data=HELD_OUT, verbose=0)
    third = model.fit(batches(16), epochs=3, initial_epoch=2, callbacks=[losses], verbose=0)
    return [model, other], [first.history, second.history, third.history, drawn, losses.seen]


def executions() -> tuple[list[Any], list[Any]]:
    """Three steps at a time, with a last execution of fewer."""
    model = build(steps_per_execution=3)
    fitted = model.fit(batches(12), epochs=5, validation_data=HELD_OUT, verbose=0)
    return [model], [fitted.history]


def unknown_size() -> tuple[list[Any], list[Any]]:
    model = build()
    fitted = model.fit(generated(), epochs=4, validation_data=batches(16).take(2), verbose=0)
    return [model], [fitted.history]


def once() -> tuple[list[Any], list[Any]]:
    """An epoch whose end shows only in a step that was entered already."""
    model = build()
    fitted = model.fit(generated(), epochs=1, verbose=0)
    return [model], [fitted.history]


def endless() -> tuple[list[Any], list[Any]]:
    """Epochs of seven batches over data of twelve that goes on from epoch to epoch."""
    model = build()
    fitted = model.fit(batches().repeat(), epochs=5, steps_per_epoch=7, verbose=0)
    return [model], [fitted.history]


def shuffled() -> tuple[list[Any], list[Any]]:
    """Fits of three epochs of six steps, each with another way to shuffle; two have their data in common."""
    model, losses = build(), Losses()
    samples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(96)
    files = tf.data.Dataset.range(6).shuffle(6, seed=2)
    rows = files.interleave(lambda file: tf.data.Dataset.from_tensor_slices((X[:80], Y[:80])).shard(6, file))
    uncounted = rows.shuffle(20, seed=4).concatenate(samples.take(16)).batch(16)
    common = {"epochs": 3, "callbacks": [losses], "verbose": 0}
    fits = [
        model.fit(samples.skip(16).batch(15), validation_data=samples.take(16).batch(16), **common),
        model.fit(uncounted, **common),
        model.fit(uncounted, class_weight={0: 1.0, 1: 2.0, 2: 1.5}, **common),
        model.fit(X, Y, batch_size=16, **common),
        model.fit(samples.batch(8).repeat(), steps_per_epoch=6, **common),
    ]
    return [model], [[fitted.history for fitted in fits], losses.seen]


class Sequence(getattr(keras.utils, "PyDataset", keras.utils.Sequence)):  # type: ignore[misc]
    """Shuffles its samples at each epoch's end, as many do."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.size, self.order = size, np.arange(96)

    def __len__(self) -> int:
        return 96 // self.size

    def __getitem__(self, index: int) -> Any:
        at = self.order[self.size * index : self.size * (index + 1)]
        return X[at], Y[at]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def sequences() -> tuple[list[Any], list[Any]]:
    """Fits of three epochs of six steps; two have their data in common."""
    model, losses = build(), Losses()
    common = {"epochs": 3, "callbacks": [losses], "verbose": 0}
    data = Sequence(16)
    fits = [
        model.fit(data, validation_data=HELD_OUT, **common),
        model.fit(data, shuffle=False, **common),
        model.fit(Sequence(8), steps_per_epoch=6, **common),
        model.fit(Sequence(16, workers=2) if NOISY else Sequence(16), class_weight={0: 1.0, 1: 2.0, 2: 1.5}, **common),
    ]
    return [model], [[fitted.history for fitted in fits], losses.seen]


class Pruned(Exception):
    """What a search over parameters raises in the fits that it gives up."""


def failing() -> tuple[list[Any], list[Any]]:
    """Fits of three epochs of six steps, of which two end in their second one by an exception, which is caught."""

    class Prune(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise Pruned

    found: list[Any] = []
    for prunes in (True, True, False):
        model = build()
        try:
            fitted = model.fit(batches(16), epochs=3, callbacks=[Prune()] if prunes else [], verbose=0)
            found.append(fitted.history)
        except Pruned:
            found.append(np.random.rand())
    return [model], found


class Unlisted(keras.Model):  # type: ignore[misc]
    """Has state in what Keras does not list: optimizers of its own, a layer's memory, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.last = keras.layers.LSTM(4, stateful=True), keras.layers.Dense(3)
        self.own = [keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1, momentum=0.9)]
        self.noise = tf.random.Generator.from_seed(5)

    def call(self, x: Any) -> Any:
        return self.last(self.memory(x[:, :, None]))

    def train_step(self, data: Any) -> Any:
        x, y = data
        x += 0.1 * self.noise.normal((8, 12))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
        trained = self.trainable_variables
        gradients = tape.gradient(loss, trained)
        self.own[0].apply_gradients(zip(gradients[:3], trained[:3], strict=True))
        self.own[1].apply_gradients(zip(gradients[3:], trained[3:], strict=True))
        return {"loss": loss}


def unlisted() -> tuple[list[Any], list[Any]]:
    with STRATEGY.scope():
        model = Unlisted()
        model.compile()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
    fitted = model.fit(data, epochs=3, shuffle=False, verbose=0)
    return [model], [fitted.history, model.predict(X[:8], verbose=0).tolist()]


def collected() -> tuple[list[Any], list[Any]]:
    """A callback that keeps what it has seen in collections, two of which the script looks into."""
    log: list[float] = []
    sums = np.zeros(3)

    class Collect(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.log, self.sums, self.draw = log, sums, np.random.default_rng(1)
            self.newest: collections.deque[float] = collections.deque(maxlen=5)
            self.by_epoch, self.counts = collections.defaultdict(list), collections.Counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            loss = float(logs["loss"])
            self.log.append(loss)
            self.newest.append(loss)
            self.sums[batch % 3] += loss * self.draw.random()
            self.by_epoch[batch % 3].append(loss)
            self.counts[batch % 2] += 1

    model, collect = build(), Collect()
    model.fit(batches(), epochs=3, callbacks=[collect], verbose=0)
    kept = [list(collect.newest), sorted(collect.by_epoch.items()), sorted(collect.counts.items())]
    return [model], [log, sums.tolist(), kept]


def pauses() -> tuple[list[Any], list[Any]]:
    """A training that a test can stop in a validation, or after one."""
    model = build()

    class Pause(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and self.epoch == 1:
                pause("validation")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                pause("epoch_end")

    watching = [Pause(), keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.9)]
    fitted = model.fit(batches(), epochs=4, validation_data=batches().take(4), callbacks=watching, verbose=0)
    return [model], [fitted.history]


def pause(where: str) -> None:
    """Say that the place is reached, and wait for the test."""
    if os.environ.get("PAUSE_AT") == where:
        with open(sys.argv[3] + ".reached", "w", encoding="utf-8"):
            while not os.path.exists(sys.argv[3] + ".go"):
                time.sleep(0.001)


def main() -> None:
    _, cases, out = sys.argv[1:]
    tf.config.experimental.enable_op_determinism()
    results = {}
    for case in cases.split(","):
        keras.backend.clear_session()
        keras.utils.set_random_seed(11)
        results[case] = outcome(*globals()[case]())
    with open(out, "w", encoding="utf-8") as file:
        json.dump(results, file, default=float)


def outcome(models: list[Any], results: list[Any]) -> dict[str, Any]:
    variables = [
        [local(variable).numpy().tobytes().hex() for variable in [*model.variables, *optimizer_variables(model)]]
        for model in models
    ]
    return {"results": [*results, np.random.rand()], "variables": variables}


def local(variable: Any) -> Any:
    """This rank's own part of a variable."""
    variable = getattr(variable, "_value", variable)
    return getattr(variable, "values", [variable])[0]


def optimizer_variables(model: Any) -> list[Any]:
    variables = model.optimizer.variables
    return list(variables() if callable(variables) else variables)


if __name__ == "__main__":
    main()
