"""Profiles some steps twice, as a worker does: `profiled.py FOLDER` writes FOLDER/0 and /1, and says how it went."""

from __future__ import annotations

import json
import sys

import tensorflow as tf

from keepstep_worker import profile_writing


@tf.function
def train_step(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(x @ x)


for number in range(2):
    profile_writing.begin(tf, f"{sys.argv[1]}/{number}")
    for _ in range(5):
        train_step(tf.ones((64, 64)))
    writer = profile_writing.end(tf)
    switch = profile_writing.switch_of(tf)
    copied, wrong = writer is not None, writer.ended(wait=True) if writer is not None else ""
    print(json.dumps({"copied": copied, "wrong": wrong, "level": switch.value if switch is not None else None}))
