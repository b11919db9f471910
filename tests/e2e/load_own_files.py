"""Load checkpoints of tests/e2e/jobs/own_files.py with plain TensorFlow and Keras; a folder a line from standard input.

Each folder is one that was put back; the answer is the number that all weights hold, or what is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import own_files


def load(form: str, folder: Path) -> int:
    if form == "manager":
        import tensorflow as tf

        newest = tf.train.latest_checkpoint(folder)
        reader = tf.train.load_checkpoint(newest)
        names = [name for name in reader.get_variable_to_shape_map() if name.startswith("v")]
        assert len(names) == 4, names
        number = own_files.uniform([reader.get_tensor(name) for name in names], newest)
        assert number == int(newest.rpartition("-")[2]) == int(reader.get_tensor("epoch/.ATTRIBUTES/VARIABLE_VALUE"))
        return number
    if form == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    model = own_files.build(keras)
    if form == "backup":
        model.load_weights(folder / "backup" / "latest.weights.h5")
    else:
        own_files.load_newest(type("Options", (), {"form": form, "folder": folder}), keras, model)
    return own_files.uniform(model.get_weights(), str(folder))


def main() -> None:
    for line in sys.stdin:
        form, folder = line.rstrip("\n").split(" ", 1)
        try:
            print(load(form, Path(folder)), flush=True)
        except BaseException as error:  # whatever it is, it is the answer
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
