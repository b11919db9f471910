"""Each epoch's samples through tf.data's service, where a host runs it: `fed.py --out FOLDER [--epochs N]`.

Every rank writes OUT/samples-GENERATION-RANK.jsonl, a line for each epoch, with the samples that it was given. An
epoch's samples are shared among all ranks, by dynamic sharding: each is visited at most once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import tensorflow as tf

import keepstep_worker as keepstep

sys.path.insert(0, str(Path(__file__).parent))
from common import pass_gate

SAMPLES, BATCH = 4000, 10

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--gate", help="see common.py; counts epochs")
options = parser.parse_args()
strategy = tf.distribute.MultiWorkerMirroredStrategy()
run = keepstep.join()
service = keepstep.data_service()
newest = tf.Variable(0, dtype=tf.int64)
run.track(newest=newest)
path = options.out / f"samples-{run.generation}-{run.rank}.jsonl"


def prepare(sample: tf.Tensor) -> tf.Tensor:
    return tf.identity(sample)


for epoch in run.steps(options.epochs):
    data = tf.data.Dataset.range(SAMPLES).map(prepare).batch(BATCH, drop_remainder=True)
    if service is not None:
        data = data.apply(
            tf.data.experimental.service.distribute("distributed_epoch", service, job_name=f"epoch-{epoch}")
        )
    given: list[int] = []
    for batch in data:
        given += batch.numpy().tolist()
        time.sleep(0.01)
        if len(given) == 5 * BATCH:
            pass_gate(epoch)
    newest.assign(epoch)
    with path.open("a") as file:
        file.write(json.dumps({"epoch": epoch, "service": service, "given": given}) + "\n")
