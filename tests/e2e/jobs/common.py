"""What the training scripts share: Keras, data, model, and its variables at the end. `--legacy` makes it tf_keras.

With `--gate STEP:FILE` no step after that one is made until that file is there; there may be several.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "--legacy" in sys.argv:
    import tf_keras as keras
else:
    import keras

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep

FEATURES = 12


def make_data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(samples, FEATURES)).astype("float32")
    return x, x[:, :3].argmax(axis=1).astype("int32")


def build_model(features: int = FEATURES, classes: int = 3, wide: int = 0) -> Any:
    """A small network; without dropout in tf_keras and Keras 2, which keep its state out of anybody's reach.

    Args:
        wide: units of two layers more, that make its state a large one.
    """
    legacy = not keras.__version__.startswith("3.")
    return keras.Sequential(
        [
            keras.layers.InputLayer((features,)) if legacy else keras.Input((features,)),
            *(keras.layers.Dense(wide, activation="relu") for _ in range(2 if wide else 0)),
            keras.layers.Dense(24, activation="relu"),
            keras.layers.BatchNormalization(),
            *([] if legacy else [keras.layers.Dropout(0.3)]),
            keras.layers.Dense(classes),
        ]
    )


def source_of(kind: str, x: np.ndarray, y: np.ndarray, folder: Path) -> Any:
    """The same samples in the same order, from a source of another kind."""
    if kind == "arrays":
        return x, y
    if kind == "function":

        def samples(draws: np.random.Generator) -> Iterator[tuple[Any, Any]]:
            for at in draws.permutation(len(x)):
                yield x[at], y[at]

        return samples
    folder.mkdir(parents=True)
    if kind == "files":
        paths = [folder / f"{number}.npz" for number in range(len(x))]
        for path, features, label in zip(paths, x, y, strict=True):
            np.savez(path, x=features, y=label)
        return keepstep.Loaded(paths, read_file)
    paths = [folder / "first.tfrecord", folder / "second.tfrecord"]
    for path, begin, end in zip(paths, (0, len(x) // 3), (len(x) // 3, len(x)), strict=True):
        with tf.io.TFRecordWriter(str(path)) as records:
            for at in range(begin, end):
                records.write(x[at].tobytes() + y[at].tobytes())
    return keepstep.Loaded(keepstep.TfRecords(paths), read_record)


def read_file(path: Path) -> tuple[Any, Any]:
    with np.load(path) as file:
        return file["x"], file["y"]


def read_record(record: bytes) -> tuple[Any, Any]:
    return np.frombuffer(record, "float32", FEATURES), np.frombuffer(record, "int32", 1, 4 * FEATURES)[0]


def gates() -> dict[int, Path]:
    """After which steps to wait for which files: of each --gate STEP:FILE[,STEP:FILE...]."""
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # in one word, as tests write it, or in two, as a platform's hyperparameters are given: those name each but once
    words.add_argument("--gate", action="append", default=[])
    texts = [text.partition(":") for given in words.parse_known_args()[0].gate for text in given.split(",")]
    return {int(at): Path(path) for at, _, path in texts}


def pass_gate(step: int) -> None:
    """Wait, where there is a --gate STEP:FILE, after that step until the file is there."""
    path = gates().get(step)
    while path is not None and not path.exists():
        time.sleep(0.02)


def dawdle(pause_s: float) -> None:
    """Take so long more for a step; nobody who waits for anything is left once the gates' files are there."""
    paths = gates().values()
    if not paths or not all(path.exists() for path in paths):
        time.sleep(pause_s)


def final_variables(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """This rank's own copies: trainable, all others (BatchNorm's statistics, dropout's seed), the optimizer's."""
    groups = {
        "trainable": model.trainable_variables,
        "other": model.non_trainable_variables,
        "optimizer": optimizer.variables() if callable(optimizer.variables) else optimizer.variables,
    }
    return {
        f"{group}/{number}": np.asarray(_own(variable))
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }


def _own(variable: Any) -> Any:
    """This rank's copy of a variable."""
    held = variable if callable(variable.value) else variable.value  # Keras 3 wraps TensorFlow's
    return getattr(held, "values", [held])[0]
