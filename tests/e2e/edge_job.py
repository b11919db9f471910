"""What a graph of a host with a GPU copies to the processor to time the gradients: `edge_job.py OUT` writes JSON.

A second processor of TensorFlow's stands for the GPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from keepstep_worker import probe

ON_HOST, ON_GPU = "device:CPU:0", "device:CPU:1"


def main() -> None:
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 2)
    listed = tf.config.list_logical_devices
    tf.config.list_logical_devices = lambda kind=None: listed("CPU")[1:] if kind == "GPU" else listed(kind)

    @tf.function
    def step(x: Any) -> Any:
        with tf.device("CPU:1"):
            gradients = [tf.ones((1000, 1000)) * x, tf.ones((7,)) * x, tf.ones((3, 500)) * x]
        probe._store("gradients", gradients)
        return [tf.reduce_sum(gradient) for gradient in gradients]

    graph = step.get_concrete_function(tf.constant(2.0)).graph
    made = [op for op in graph.get_operations() if op.type == "Mul" and op.device.endswith(ON_GPU)]
    copied = [
        (each.shape.num_elements(), sorted(graph_ops_before(each.op) & {op.name for op in made}))
        for op in graph.get_operations()
        if op.type == "Identity" and op.device.endswith(ON_HOST)
        for each in op.inputs
        if each.op.device.endswith(ON_GPU)
    ]
    before_ns = time.monotonic_ns()
    step(tf.constant(2.0))
    told = {"gradients": sorted(op.name for op in made), "copied": copied}
    told["is_timed"] = before_ns - 10**9 < probe._read(probe._probe.stamps["gradients"]) <= time.monotonic_ns() + 10**9
    Path(sys.argv[1]).write_text(json.dumps(told))


def graph_ops_before(op: Any) -> set[str]:
    """The names of all operations that one waits for."""
    found, left = set(), [op]
    while left:
        for each in (*(given.op for given in left[-1].inputs), *left.pop().control_inputs):
            if each.name not in found:
                found.add(each.name)
                left.append(each)
    return found


main()
