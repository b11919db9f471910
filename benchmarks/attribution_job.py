"""The training that attribution.py hurts: a custom loop on all ranks, each of which does what it is told to, once.

What a rank is to do lies in `FOLDER/do-RANK` as one word, written there by whoever hurts it; it is done after a step.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import keepstep_worker as keepstep

HOG_BYTES = 64 << 20


def hog() -> None:
    """Take memory until somebody objects."""
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1) * HOG_BYTES))


def crash() -> None:
    ctypes.string_at(0)


def hang() -> None:
    threading.Event().wait()


def fail() -> None:
    raise ValueError("the data is bad")


def leave() -> None:
    os._exit(3)


DEEDS = {"exception": fail, "exit": leave, "segfault": crash, "memory": hog, "hang": hang}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(tf.zeros((1000,)))

    @tf.function
    def train_step() -> Any:
        def replica() -> None:
            context = tf.distribute.get_replica_context()
            weight.assign_add(context.all_reduce("sum", tf.ones((1000,))))

        return strategy.run(replica)

    run = keepstep.join()
    run.track(weight=weight)
    order = folder / f"do-{run.rank}"
    for _ in run.steps(sys.maxsize):
        train_step()
        time.sleep(0.02)
        if order.exists():
            deed = order.read_text()
            order.unlink()
            DEEDS[deed]()


if __name__ == "__main__":
    main()
