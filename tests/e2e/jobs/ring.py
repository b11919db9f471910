"""Horovod, or `--smddp` SageMaker's data parallel library, in a custom loop: rank 0 writes the final variables.

Each rank leaves OUT/ranks/GENERATION-RANK.json, in which it says who it is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep

sys.path.insert(0, str(Path(__file__).parent))
import common

SLOW_S = 0.2

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--gate", help="see common.py")
parser.add_argument("--smddp", action="store_true")
parser.add_argument("--raise-at", type=int, default=0, help="step that rank 1 does not survive, once")
parser.add_argument("--hang-at", type=int, default=0, help="step behind which the last rank sleeps for ever, once")
parser.add_argument("--slow", type=int, default=-1, help="rank that takes longer between its steps; times are taken")
options = parser.parse_args()
hvd = importlib.import_module("smdistributed.dataparallel.tensorflow" if options.smddp else "horovod.tensorflow")

tf.keras.utils.set_random_seed(3)
if options.slow < 0:
    tf.config.experimental.enable_op_determinism()
hvd.init()
run = keepstep.join()
assert (run.rank, run.world_size) == (hvd.rank(), hvd.size()), (run.rank, run.world_size, hvd.rank(), hvd.size())
shown = {name: os.environ.get(name) for name in ("SM_CURRENT_HOST", "SM_HOSTS", "STARTED_BY", "PMIX_SERVER_TMPDIR")}
folder = options.out / "ranks"
folder.mkdir(parents=True, exist_ok=True)
told = {"local": hvd.local_rank(), "size": hvd.size(), "pid": os.getpid(), **shown}
mark = options.out / "raised"
said = folder / f"{run.generation}-{hvd.rank()}.json"
said.with_suffix(".new").write_text(json.dumps(told))
said.with_suffix(".new").replace(said)

model = common.build_model()
optimizer = common.keras.optimizers.Adam(0.01)
data = run.dataset(common.make_data(960), global_batch=48, seed=7)
run.track(model=model, optimizer=optimizer, data=data)
hvd.broadcast_variables(model.variables, root_rank=0)
loss = common.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function(reduce_retracing=True)
def train_step(x: tf.Tensor, y: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        value = data.scale_loss(loss(y, model(x, training=True)))
    gradients = tape.gradient(value, model.trainable_variables)
    reduced = [hvd.allreduce(gradient, op=hvd.Sum) for gradient in gradients]
    optimizer.apply_gradients(zip(reduced, model.trainable_variables, strict=True))


for step in run.steps(options.steps):
    if step == options.raise_at and hvd.rank() == 1 and not mark.exists():
        mark.touch()
        raise ValueError("rank 1 does not like this step")
    train_step(*next(data))
    if step == options.hang_at and hvd.rank() == hvd.size() - 1 and not mark.exists():
        mark.touch()
        time.sleep(3600)
    common.pass_gate(step)
    time.sleep(options.pause + SLOW_S * (hvd.rank() == options.slow))
if hvd.rank() == 0:
    np.savez(options.out / "final.npz", **common.final_variables(model, optimizer))
print(f"rank {hvd.rank()} is done at step {run.step}", flush=True)
