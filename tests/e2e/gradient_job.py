"""The gradient of the first global batches, added up over all ranks: `gradient_job.py STEPS OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep

SAMPLES, FEATURES, BATCH = 64, 6, 21


def main() -> None:
    run = keepstep.join()
    several = bool(os.environ.get("TF_CONFIG"))
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    generator = np.random.Generator(np.random.Philox(5))
    x = generator.normal(size=(SAMPLES, FEATURES)).astype("float32")
    y = (x**2).sum(axis=1, keepdims=True)
    with strategy.scope():
        weights = [tf.Variable(generator.normal(size=shape).astype("float32")) for shape in ((FEATURES, 8), (8, 1))]
    data = run.dataset((x, y), global_batch=BATCH, seed=7, strategy=strategy)
    run.track(data=data, first=weights[0], second=weights[1])

    @tf.function
    def gradients_of(batch: Any) -> Any:
        def replica(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                found = tf.matmul(tf.tanh(tf.matmul(inputs, weights[0])), weights[1])
                loss = data.scale_loss(tf.reduce_sum(tf.square(found - labels), axis=1))
            gradients = tape.gradient(loss, weights)
            return tf.distribute.get_replica_context().all_reduce("sum", gradients)

        return strategy.run(replica, args=batch)

    steps = []
    for _ in run.steps(int(sys.argv[1])):
        batch = next(data)
        gradients = gradients_of(batch)
        steps.append({"samples": len(batch[0]), "gradients": [np.asarray(each).tolist() for each in gradients]})
    told = {"local_batch": run.local_batch, "global_batch": run.global_batch, "steps": steps}
    Path(sys.argv[2]).write_text(json.dumps(told))


main()
