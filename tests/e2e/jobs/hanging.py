"""`fit` on several hosts, one rank of which hangs once: `hanging.py --out FOLDER --how HOW [--rank R] [--at STEP]`.

HOW is `data` (a sleep in the data pipeline), `callback` (a sleep in a callback), `lock` (one that nobody gives back),
`native` (compiled code that never returns and holds the interpreter), `kernel` (a process that the kernel does not let
go: the parent of a vfork) or `none`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH, STEPS, EPOCHS = 16, 40, 2


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def spin() -> None:
    re.match(r"(a+)+$", "a" * 100 + "b")  # takes longer than anybody lives


def sink_into_the_kernel() -> None:
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.pause()


HANGS: dict[str, Callable[[], None]] = {
    "callback": sleep_for_ever,
    "data": sleep_for_ever,
    "lock": deadlock,
    "native": spin,
    "kernel": sink_into_the_kernel,
}


class Once:
    """Hangs at one step of one rank, in the first life of the script only."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.how, self.at = args.how, args.at
        self.mark = args.out / "hung"
        self.wanted = rank == args.rank and args.how in HANGS and not self.mark.exists()

    def reach(self, step: int) -> None:
        if self.wanted and step == self.at:
            self.mark.touch()
            HANGS[self.how]()


class Pace(keras.callbacks.Callback):
    """Makes each step take a moment; hangs where that is wanted of a callback."""

    def __init__(self, once: Once) -> None:
        super().__init__()
        self.once = once

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.1 if self.once.how == "none" else 0.02)  # to be stopped from outside takes a while
        if self.once.how != "data":
            self.once.reach(batch + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--how", choices=(*HANGS, "none"), default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--at", type=int, default=20)
    args = parser.parse_args()
    several = bool(os.environ.get("TF_CONFIG"))
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if several else 0
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    once = Once(args, rank)
    draw = np.random.default_rng(5)
    x = draw.normal(size=(BATCH * STEPS, 12)).astype("float32")

    def load(number: Any) -> Any:
        if once.how == "data":
            once.reach(int(number) // BATCH)
        return x[int(number)]

    def example(number: Any) -> tuple[Any, Any]:
        features = tf.ensure_shape(tf.py_function(load, [number], tf.float32), (12,))
        return features, tf.argmax(features[:3])

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.range(len(x)).map(example).batch(BATCH, drop_remainder=True).with_options(options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(24, "relu"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
    model.fit(data, epochs=EPOCHS, callbacks=[Pace(once)], verbose=2)


if __name__ == "__main__":
    main()
