"""Write the golden files anew, with TensorFlow, Keras and h5py: run this file in an environment that has them.

The tests read what lies here and need none of the three. Written with TensorFlow 2.21.0, Keras 3.15.1, h5py 3.14.0
(HDF5 1.14.6).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import keras
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent


def fresh(name: str) -> Path:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def variables(scale: float) -> dict[str, tf.Variable]:
    tf.random.set_seed(1)
    return {
        "kernel": tf.Variable(scale * tf.reshape(tf.range(48, dtype=tf.float32), [6, 8])),
        "half": tf.Variable(tf.cast(scale * tf.range(5, dtype=tf.float32), tf.bfloat16)),
        "flag": tf.Variable(True),
        "empty": tf.Variable(tf.zeros([0, 3])),
        "words": tf.Variable(["", "été", "a longer one " * 20]),
    }


def managed() -> None:
    """Two saves of one CheckpointManager, which differ: an index of one does not go with the other's data."""
    folder = fresh("managed")
    named = variables(1.0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**named), folder, max_to_keep=2)
    manager.save()
    named["kernel"].assign_add(tf.ones([6, 8]))
    manager.save()


def sharded() -> None:
    """Three data files, made as TensorFlow does: saved apart, then merged, which renames them and writes one index."""
    folder = fresh("sharded")
    parts = []
    for number, (name, variable) in enumerate(variables(2.0).items()):
        if name in ("kernel", "half", "words"):
            parts.append(str(folder / f"part-{number}"))
            tf.raw_ops.SaveV2(
                prefix=parts[-1], tensor_names=[name], shape_and_slices=[""], tensors=[variable.read_value()]
            )
    prefix = str(folder / "model.ckpt-40")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False)


def iterator() -> None:
    """State of an input pipeline: tensors of variants, one with several values."""
    data = iter(tf.data.Dataset.range(20).shuffle(4, seed=7).batch(2))
    next(data)
    tf.train.Checkpoint(data=data).write(fresh("iterator") / "pipeline")


def sliced() -> None:
    """A tensor saved in two slices, as partitioned variables are."""
    whole = tf.reshape(tf.range(12, dtype=tf.float32), [4, 3])
    tf.raw_ops.SaveV2(
        prefix=str(fresh("sliced") / "parts"),
        tensor_names=["whole", "whole"],
        shape_and_slices=["4 3 0,2:-", "4 3 2,2:-"],
        tensors=[whole[:2], whole[2:]],
    )


def many() -> None:
    """More names than one block of the index holds."""
    count = 150
    tf.raw_ops.SaveV2(
        prefix=str(fresh("many") / "ckpt-7"),
        tensor_names=[f"layer_with_weights-{number}/kernel/.ATTRIBUTES/VARIABLE_VALUE" for number in range(count)],
        shape_and_slices=[""] * count,
        tensors=[tf.constant(number, tf.int64) for number in range(count)],
    )


def of_keras() -> None:
    folder = fresh("keras")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.save(folder / "model.05-0.21.keras")
    model.save_weights(folder / "model.05.weights.h5")
    model.save(folder / "legacy.h5")


def backup() -> None:
    folder = fresh("backup")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    kept = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    model.fit(np.zeros((4, 3)), np.zeros((4, 2)), epochs=2, verbose=0, callbacks=[kept])


def plain_h5() -> None:
    """The newer forms of the superblock, which `libver` chooses."""
    folder = fresh("h5")
    for name, libver in (("v2", ("v108", "v108")), ("v3", ("v110", "v110"))):
        with h5py.File(folder / f"{name}.h5", "w", libver=libver) as file:
            file["values"] = np.arange(10)


if __name__ == "__main__":
    managed()
    sharded()
    iterator()
    sliced()
    many()
    of_keras()
    backup()
    plain_h5()
