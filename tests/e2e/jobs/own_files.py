"""A script that knows nothing of keepstep and writes its own checkpoints, one form of them, as fast as it can.

All weights hold the number of the epoch they were saved in: what mixes two saves gives itself away, here at the start
of the next attempt and to whoever loads what was committed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

FORMS = ("manager", "backup", "keras", "weights", "tf_keras")
WIDTH = 700


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.form == "manager":
        started = manage(options)
    else:
        started = fit(options)
    (options.out / "done.json").write_text(json.dumps({"started": started, "epochs": options.epochs}))


def note(options: argparse.Namespace, epoch: int) -> None:
    """Say from where this attempt goes on."""
    with (options.out / "started.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": epoch, "at": time.time()}) + "\n")


def uniform(weights: list, what: str) -> int:
    """The number that all weights hold; ends the script where they hold two."""
    import numpy as np

    values = np.unique(np.concatenate([np.ravel(each) for each in weights]))
    if len(values) != 1:
        raise SystemExit(f"TORN: {what} mixes {values[:4]}")
    return int(values[0])


def manage(options: argparse.Namespace) -> int:
    import tensorflow as tf

    variables = {f"v{number}": tf.Variable(tf.zeros([WIDTH, WIDTH])) for number in range(4)}
    checkpoint = tf.train.Checkpoint(epoch=tf.Variable(0), **variables)
    manager = tf.train.CheckpointManager(checkpoint, options.folder, max_to_keep=3)
    manager.restore_or_initialize()
    started = uniform([v.numpy() for v in variables.values()], "the manager's latest")
    note(options, started)
    for epoch in range(started + 1, options.epochs + 1):
        checkpoint.epoch.assign(epoch)
        for variable in variables.values():
            variable.assign(tf.fill([WIDTH, WIDTH], float(epoch)))
        manager.save(checkpoint_number=epoch)
    return started


def build(keras):
    model = keras.Sequential([keras.Input([WIDTH]), keras.layers.Dense(WIDTH)])
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
    return model


def fit(options: argparse.Namespace) -> int:
    import numpy as np

    if options.form == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    model = build(keras)
    model.set_weights([np.zeros_like(each) for each in model.get_weights()])
    load_newest(options, keras, model)
    started = uniform(model.get_weights(), "what was loaded")

    class Mark(keras.callbacks.Callback):
        """Comes before the one that saves: the weights are the number of the epoch that ends."""

        noted = False

        def on_epoch_begin(self, epoch, logs=None):
            if not self.noted:  # by now BackupAndRestore has restored
                note(options, uniform(self.model.get_weights(), "what was restored"))
                self.noted = True

        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([np.full_like(each, epoch + 1) for each in self.model.get_weights()])

    data = np.zeros([4, WIDTH], "float32")
    callbacks = [Mark(), saver(options, keras)]
    model.fit(data, data, epochs=options.epochs, initial_epoch=started, callbacks=callbacks, verbose=0)
    return started


def saver(options: argparse.Namespace, keras):
    if options.form == "backup":
        return keras.callbacks.BackupAndRestore(str(options.folder / "backup"))
    name = {"keras": "model.{epoch:05d}.keras", "weights": "model.weights.h5", "tf_keras": "cp-{epoch:05d}.ckpt"}
    path = str(options.folder / name[options.form])
    return keras.callbacks.ModelCheckpoint(path, save_weights_only=options.form != "keras")


def load_newest(options: argparse.Namespace, keras, model) -> None:
    """Load the newest file by its name, as scripts do; BackupAndRestore does it by itself."""
    pattern = {"keras": "model.*.keras", "weights": "model.weights.h5", "tf_keras": "cp-*.index"}.get(options.form)
    found = sorted(options.folder.glob(pattern)) if pattern else []
    if not found:
        return
    if options.form == "keras":
        model.set_weights(keras.models.load_model(found[-1]).get_weights())
    else:
        model.load_weights(str(found[-1].with_suffix("") if options.form == "tf_keras" else found[-1]))


if __name__ == "__main__":
    main()
