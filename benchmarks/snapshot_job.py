"""The training that snapshot.py measures: a state of many variables with Adam's slots, saved every so many steps.

One mode a process: `keepstep` under a real agent, which decides into which slab; `sync` and `async`,
`tf.train.Checkpoint` as it comes and with `enable_async`; `memcpy`, the same bytes copied to memory that was touched
before. Leaves a JSON object: nanoseconds of every step, saving included, and of every saving.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import keepstep_worker as keepstep
from keepstep_worker.session import Session

WEIGHTS = 340
"""Beside each its two slots of Adam: a thousand variables and more."""
SLABS, SETTLES_WITHIN = 3, 200
COPIES = 9
"""By which it is found out how much faster more threads copy than one."""


class State(tf.Module):
    """Weights and Adam's slots, of so many bytes in all; a step changes all of them, as Adam's does."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        count = max(1, size_bytes // (4 * 3 * WEIGHTS))
        self.weights = [tf.Variable(tf.fill((count,), 0.5), name=f"weight_{n}") for n in range(WEIGHTS)]
        self.first = [tf.Variable(tf.zeros((count,)), name=f"first_{n}") for n in range(WEIGHTS)]
        self.second = [tf.Variable(tf.zeros((count,)), name=f"second_{n}") for n in range(WEIGHTS)]
        self.matrix = tf.constant(np.random.default_rng(1).normal(size=(768, 768)).astype("float32"))

    @tf.function
    def step(self) -> Any:
        product = self.matrix
        for _ in range(4):
            product = tf.linalg.matmul(product, self.matrix) * 1e-3
        change = tf.reduce_mean(product)
        gradient = tf.fill(self.weights[0].shape, change)
        for weight, first, second in zip(self.weights, self.first, self.second, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle, m=first.handle, v=second.handle, beta1_power=0.9, beta2_power=0.999, lr=1e-3,
                beta1=0.9, beta2=0.999, epsilon=1e-7, grad=gradient,
            )  # fmt: skip
        return change


class Saver:
    """What is called before and after each step; a saving is due after every `every`-th."""

    def __init__(self, options: argparse.Namespace, state: State) -> None:
        self._every, self._folder, self._mode = options.every, options.folder, options.mode
        self._skipped = 0
        self._session = Session.current()
        if self._mode == "keepstep":
            assert self._session is not None, "this mode runs under keepstep only"
            keepstep.join().track(state=state)
        elif self._mode == "memcpy":
            self._sources = [memoryview(variable.read_value()).cast("B") for variable in state.variables]
            self._target = np.ones(sum(source.nbytes for source in self._sources), "uint8")  # touched, every page
        else:
            self._checkpoint = tf.train.Checkpoint(state=state)
            self._options = tf.train.CheckpointOptions(enable_async=self._mode == "async")

    def due(self, number: int) -> bool:
        return bool(number % self._every == 0)

    def before(self, number: int) -> None:
        if self._mode == "keepstep" and self._session is not None:
            self._session.enter_step(number, 0)

    def after(self, number: int) -> None:
        if self._mode == "keepstep" and self._session is not None:
            self._session.complete_step(number)
        elif self.due(number) and self._mode == "memcpy":
            at = 0
            for source in self._sources:
                self._target[at : at + source.nbytes] = source
                at += source.nbytes
        elif self.due(number):
            self._checkpoint.write(str(self._folder / f"{number}" / "checkpoint"), self._options)
            shutil.rmtree(self._folder / f"{number - 2 * self._every}", ignore_errors=True)

    def settle(self, state: State) -> int:
        """Train until each of three slabs was written to once: they have to be there, and be memory; returns the steps.

        Raises:
            SystemExit: keepstep has no slabs for such a state.
        """
        session, seals, number, sealed_ns = self._session, 0, 0, 0
        if self._mode != "keepstep" or session is None:
            return 0
        while seals < SLABS or number % self._every:
            number += 1
            if number > SETTLES_WITHIN * self._every:
                raise SystemExit(f"{seals} snapshots within {number} steps")
            self.before(number)
            state.step().numpy()
            self.after(number)
            seals, sealed_ns = seals + (session.snapshot_ns != sealed_ns), session.snapshot_ns
        self._skipped = session.skipped
        return number

    def finish(self) -> dict[str, Any]:
        """Wait for what is still being written; what else there is to tell."""
        if self._mode == "async":
            self._checkpoint.sync()
        elif self._mode == "memcpy":
            return {"copy_speedup": copy_speedup(self._target)}
        if self._mode != "keepstep" or self._session is None:
            return {}
        self._session.finish()
        return {"skipped": self._session.skipped - self._skipped}


def copy_speedup(memory: Any) -> float:
    """How many times as fast as by one thread this machine's cores copy half of an array to its other half."""
    cores, half = len(os.sched_getaffinity(0)), len(memory) // 2
    took: dict[int, list[float]] = {1: [], cores: []}
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(COPIES):
            for threads, each in took.items():
                parts = [slice(half * n // threads, half * (n + 1) // threads) for n in range(threads)]
                begun = time.perf_counter()
                list(pool.map(lambda part: np.copyto(memory[half:][part], memory[:half][part]), parts))
                each.append(time.perf_counter() - begun)
    return statistics.median(took[1]) / statistics.median(took[cores])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("keepstep", "sync", "async", "memcpy"), required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--savings", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints of TensorFlow's own modes")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    state = State(options.bytes)
    saver = Saver(options, state)
    steps_ns, savings_ns = [], []
    state.step().numpy()  # traced
    settled = saver.settle(state)
    for number in range(settled + 1, settled + options.every * (options.savings + 1)):
        begun = time.perf_counter_ns()
        saver.before(number)  # which waits where what was left is to be copied by now
        state.step().numpy()
        trained = time.perf_counter_ns()
        saver.after(number)
        ended = time.perf_counter_ns()
        steps_ns.append(ended - begun)
        if saver.due(number):
            savings_ns.append(ended - trained)
    more = saver.finish()
    size_bytes = sum(int(variable.shape.num_elements()) * variable.dtype.size for variable in state.variables)
    result = {"steps_ns": steps_ns, "savings_ns": savings_ns, "bytes": size_bytes, "variables": len(state.variables)}
    options.result.write_text(json.dumps(result | more))


if __name__ == "__main__":
    main()
