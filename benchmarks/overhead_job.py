"""The training that overhead.py measures: blocks of steps with keepstep's instrumentation, and blocks without.

A custom loop with a Keras 3 model, driven the way `run.steps` drives one. Only instrumented steps are counted as steps,
so that a block without instrumentation brings no snapshot nearer. Without: the same traced function, gradient probe
included, and no call into keepstep. What the probe takes is measured apart: a model that is traced twice differs by up
to 2 ms from process to process, and the probe is two operations on a scalar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import keepstep_worker as keepstep
from keepstep_worker import probe
from keepstep_worker.session import Session

WIDTH = 724  # a kernel of 724 x 724 float32 has 2.1 MB
LAYERS = 8
KERNELS = 100
"""Variables of 2.1 MB in all: kernels, their momenta, and what is not trained."""
SMALL_WIDTH, TRACES, SETTLING = 32, 6, 20
PROBE_PAIRS, PROBE_BLOCK = 60, 200
READ_EVERY = 2
"""Steps of 50 ms between two readings of the stored times, which are 0.2 s apart."""
SETTLED_SNAPSHOTS = 5
"""Each of three slabs was written to for the first time, and the cadence has followed what a snapshot costs then."""

Step = Callable[[Any], Any]


class Frozen(tf.Module):
    """State that belongs to the model and is not trained, as embeddings or averages are."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.kept = [tf.Variable(tf.random.normal((WIDTH, WIDTH)), trainable=False) for _ in range(count)]


def build() -> tuple[Any, Any, Frozen]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
    return model, keras.optimizers.SGD(1e-6, momentum=0.9), Frozen(KERNELS - 2 * LAYERS)


def trace(model: Any, optimizer: Any) -> Step:
    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH), tf.float32)])
    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - inputs))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def seconds_of(step: Step, samples: int, times: int) -> float:
    """Median seconds of a step on so many samples."""
    inputs, found = tf.random.normal((samples, WIDTH)), []
    for _ in range(times):
        begun = time.perf_counter()
        step(inputs)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def fit_samples(step: Step, wanted_s: float) -> int:
    """How many samples make a step last `wanted_s` on this machine: a straight line through two sizes, then a trial."""
    few, many = 8, 64
    seconds_of(step, few, 5)
    few_s, many_s = seconds_of(step, few, 20), seconds_of(step, many, 20)
    per_sample_s = max((many_s - few_s) / (many - few), 1e-6)
    samples = max(1, round(few + (wanted_s - few_s) / per_sample_s))
    trial_s = seconds_of(step, samples, 20)
    return max(1, round(samples + (wanted_s - trial_s) / per_sample_s))


class Probed:
    """Steps of a small model, of traces with the probe in them and of traces without.

    What the probe takes does not grow with the model. Of a large one, traces of the same function differ by up to 2 ms
    a step, of this one by some microseconds; there are several traces of each kind, so that this evens out.
    """

    def __init__(self) -> None:
        layers = [keras.layers.Dense(SMALL_WIDTH) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((SMALL_WIDTH,)), *layers])
        optimizer = keras.optimizers.SGD(1e-6)
        optimizer.build(model.trainable_variables)
        batches = tf.data.Dataset.from_tensors(tf.random.normal((SMALL_WIDTH, SMALL_WIDTH))).repeat()
        # as a world of several ranks has them: there is a stamp more where these agree on a batch
        data = iter(tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(batches))

        def traced(mark: Callable[..., None]) -> Callable[[], Any]:
            @tf.function
            def step() -> Any:
                inputs = next(data)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(inputs, training=True) - inputs))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                return loss

            kept, probe._mark = probe._mark, mark
            try:
                for _ in range(SETTLING):
                    step()
            finally:
                probe._mark = kept
            return step

        self._steps = {
            kind: [traced(mark) for _ in range(TRACES)]
            for kind, mark in ((True, probe._mark), (False, lambda *_: None))
        }
        if missing := [name for name, stamp in probe._probe.stamps.items() if stamp.handle is None]:
            raise SystemExit(f"the probe has not traced {', '.join(missing)}")

    def block(self, probed: bool, number: int, count: int) -> float:
        """Mean seconds of a step of a block; the stored times are read as often as in steps of 50 ms."""
        step = self._steps[probed][number % TRACES]
        begun = time.perf_counter()
        for at in range(count):
            begun_ns = time.monotonic_ns()
            step()
            if probed and at % READ_EVERY == 0:
                probe._probe.wanted = 0
                assert probe.moments(begun_ns).gradients, "the probe has measured nothing"
        return (time.perf_counter() - begun) / count

    def pairs(self, count: int, block: int) -> list[float]:
        """Seconds by which a step with the probe is longer than one without, pair by pair of blocks in random order."""
        order, found = random.Random(11), []
        for number in range(count):
            seconds = {kind: self.block(kind, number, block) for kind in order.sample((True, False), 2)}
            found.append(seconds[True] - seconds[False])
        return found


class Measured:
    """Runs blocks of steps and notes the nanoseconds of each."""

    def __init__(self, run: Any, session: Session, inputs: Any) -> None:
        self._run, self._session, self._inputs = run, session, inputs

    def without(self, step: Step, count: int) -> dict[str, Any]:
        """A block of plain steps."""
        marks = [time.perf_counter_ns()]
        for _ in range(count):
            step(self._inputs)
            marks.append(time.perf_counter_ns())
        return {"instrumented": False, "step_ns": gaps(marks)}

    def instrumented(self, step: Step, count: int) -> dict[str, Any]:
        """A block of steps with all that `run.steps` does around each; what keepstep took of it, and its snapshots."""
        run, session = self._run, self._session
        marks, own_ns, snapshots = [time.perf_counter_ns()], [], {}
        for at in range(count):
            number = session.completed_step + 1
            begun_ns = time.perf_counter_ns()
            session.enter_step(number, 0)
            entered_ns = time.perf_counter_ns()
            step(self._inputs)
            trained_ns = time.perf_counter_ns()
            sealed_ns = session.snapshot_ns
            session.complete_step(number, run._times(session))
            marks.append(time.perf_counter_ns())
            own_ns.append(entered_ns - begun_ns + marks[-1] - trained_ns)
            if session.snapshot_ns != sealed_ns:
                snapshots[at] = session.snapshot_ns
        return {"instrumented": True, "step_ns": gaps(marks), "own_ns": own_ns, "snapshot_ns": snapshots}


def gaps(marks: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pairs", type=int, required=True, help="blocks with instrumentation, and as many without")
    parser.add_argument("--block", type=int, required=True, help="steps in a block")
    parser.add_argument("--warm-up", type=int, required=True, help="blocks before the first one, at the most")
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    run = keepstep.join()
    session = Session.current()
    assert session is not None, "this job runs under keepstep only"
    model, optimizer, frozen = build()
    run.track(model=model, optimizer=optimizer, frozen=frozen)
    step = trace(model, optimizer)
    samples = fit_samples(step, options.step_s)
    measured = Measured(run, session, tf.random.normal((samples, WIDTH)))
    measured.without(step, options.block)
    warm_up_ns: list[int] = []
    for _ in range(options.warm_up):
        warm_up_ns += measured.instrumented(step, options.block)["snapshot_ns"].values()
        if len(warm_up_ns) >= SETTLED_SNAPSHOTS:
            break
    (options.folder / "measuring").touch()
    blocks = []
    order = random.Random(7)
    for _ in range(options.pairs):
        pair = [lambda: measured.instrumented(step, options.block), lambda: measured.without(step, options.block)]
        order.shuffle(pair)
        blocks += [pair[0](), pair[1]()]
    (options.folder / "measured").touch()
    variables = [*model.variables, *optimizer.variables, *frozen.variables]
    state_bytes = sum(variable.numpy().nbytes for variable in variables)
    result = {
        "blocks": blocks,
        "probe_s": Probed().pairs(PROBE_PAIRS, PROBE_BLOCK),
        "samples": samples,
        "snapshot_every": session._orders().snapshot_every,
        "skipped": session.skipped,
        "state_bytes": state_bytes,
        "variables": len(variables),
        "warm_up_snapshot_ns": warm_up_ns,
    }
    (options.folder / "blocks.json").write_text(json.dumps(result))
    session.finish()


main()
