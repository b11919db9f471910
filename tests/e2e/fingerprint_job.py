"""What TensorFlow makes of fingerprints: `fingerprint_job.py OUT` writes JSON, by the names of what was tried."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config

from keepstep_worker import fingerprint

KNOB = "KEEPSTEP_FINGERPRINT"
GRADIENTS = (np.arange(12, dtype="float32").reshape(3, 4) / 7, np.linspace(-1, 1, 5, dtype="float32"))


def step(*given: Any) -> None:
    fingerprint.see(list(given))


def found(function: Callable[..., None], *given: Any) -> list[str]:
    """The value, or why there is none, of a step."""
    fingerprint.begin()
    function(*(tf.constant(each) if isinstance(each, np.ndarray) else each for each in given))
    return list(fingerprint.end())


def ops_of(function: Any) -> list[str]:
    """What is in the graph of a function and of those that it calls."""
    graph = function.get_concrete_function(*map(tf.constant, GRADIENTS)).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return sorted({node.op for node in nodes} - {"Placeholder", "NoOp"})


def flipped(gradient: np.ndarray, place: int, bit: int) -> np.ndarray:
    bits = gradient.copy().reshape(-1).view("uint32")
    bits[place] ^= np.uint32(1 << bit)
    return bits.view("float32").reshape(gradient.shape)


def sparse(values: np.ndarray, *rows: int) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows, tf.int64), tf.constant((9, 4), tf.int64))


def main() -> None:
    told: dict[str, Any] = {"ops without the knob": ops_of(tf.function(step))}
    os.environ[KNOB] = "on"
    told["loose"] = found(tf.function(step), *GRADIENTS)
    told["ops without determinism"] = ops_of(tf.function(step))
    config.enable_op_determinism()
    fingerprint._state = fingerprint._State()
    told["ops"] = ops_of(tf.function(step))
    first, second = GRADIENTS
    traced = tf.function(step)
    told["whole"] = found(traced, *GRADIENTS)
    told["again"] = found(traced, *GRADIENTS)
    told["traced anew"] = found(tf.function(step), *GRADIENTS)
    traced(*map(tf.constant, GRADIENTS))
    told["after a step that was not looked at"] = found(traced, *GRADIENTS)
    told["flipped"] = [found(traced, flipped(first, place, bit), second) for place in (0, 7, 11) for bit in (0, 31)]
    told["swapped"] = found(traced, first.reshape(-1)[[1, 0, *range(2, 12)]].reshape(3, 4), second)
    told["other order"] = found(tf.function(step), second, first)
    told["negative zero"] = [found(tf.function(step), np.array([zero], "float32")) for zero in (0.0, -0.0)]
    told["not a number"] = found(traced, np.full_like(first, np.nan), second)
    told["none"] = found(tf.function(lambda given: fingerprint.see([None, given])), first)
    told["empty"] = found(tf.function(step), np.zeros((0, 3), "float32"), first)
    told["half"] = [found(tf.function(step), tf.cast(first, kind)) for kind in (tf.float16, tf.bfloat16, tf.float64)]
    rows = first[:2]
    told["sparse"] = [found(tf.function(step), sparse(rows, *where)) for where in ((1, 2), (1, 2), (2, 1), (1, 3))]
    told["jit"] = found(tf.function(step, jit_compile=True), *GRADIENTS)
    fingerprint._state = fingerprint._State()
    told["eager"] = found(step, *GRADIENTS)
    fingerprint._state = fingerprint._State()
    told["jit alone"] = found(tf.function(step, jit_compile=True), *GRADIENTS)
    Path(sys.argv[1]).write_text(json.dumps(told))


main()
