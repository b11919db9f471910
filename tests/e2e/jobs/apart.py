"""Two hosts that make different initial values: of variables in the state, and of some that are nobody's.

Each rank leaves OUT/told/GENERATION-RANK.json, which says how many initial values were sent to or by it until the state
was there, and what the variables were then. Trains until it is interrupted; rank 1 dies, once, when OUT/die is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops

import keepstep_worker as keepstep

TRACKED, FREE = 6, 3
sent = 0


def counted(original: Any) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        global sent
        sent += 1
        return original(*args, **keywords)

    return call


class Own:
    """A state of this rank alone, which it keeps in a variable of the strategy's."""

    def __init__(self, value: float) -> None:
        self.variable = tf.Variable(value, name="own")

    def state(self) -> float:
        return float(self.variable.read_value())

    def set_state(self, state: float) -> None:
        self.variable.assign(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for name in ("broadcast_send", "broadcast_recv"):
        setattr(collective_ops, name, counted(getattr(collective_ops, name)))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    run = keepstep.join()
    own = 100.0 * run.generation + 10.0 * run.rank  # no two processes make the same
    with strategy.scope():
        state = tf.Module()
        state.weights = [tf.Variable([own + n] * 4, name=f"weight_{n}") for n in range(TRACKED)]
        free = [
            tf.Variable(lambda n=n: tf.fill((2,), own + n), dtype=tf.float32, name=f"free_{n}") for n in range(FREE)
        ]
        moved, mine = tf.Variable(own, name="moved"), Own(own)
    moved.assign(run.rank + 7.0)
    mine.set_state(run.rank + 70.0 if run.generation == 1 else own)

    @tf.function
    def train_step() -> Any:
        def replica() -> Any:
            for weight in state.weights:
                weight.assign_add(tf.ones((4,)))
            return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))

        return strategy.run(replica)

    run.track(state=state, mine=mine)
    with strategy.scope():
        late = tf.Variable(own, name="late")
    shown = {
        "sent": sent,
        "step": run.step,
        "tracked": [float(weight.read_value()[0]) for weight in state.weights],
        "free": [float(each.read_value()[0]) for each in [*free]] + [float(late.read_value())],
        "moved": float(moved.read_value()),
        "mine": mine.state(),
        "made": own,
    }
    told = options.out / "told" / f"{run.generation}-{run.rank}.json"
    told.parent.mkdir(exist_ok=True)
    told.with_suffix(".new").write_text(json.dumps(shown))
    told.with_suffix(".new").replace(told)
    mark = options.out / "killed"
    for _ in run.steps(10**9):
        train_step()
        if run.rank == 1 and (options.out / "die").exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
