"""Where a step's time goes: when its data were there, when its own work began, and when its gradients were ready.

In a synchronous step everybody is as slow as the slowest, so the length of a step names nobody; the time that a rank
spends on its own data and its own gradients does. While a train function is traced, operations are put behind the batch
and behind the gradients that store the time of day; they are read once in a while. Where XLA compiles the function, or
op determinism is on, TensorFlow refuses these operations: nothing is measured.

Ranks of one world may agree on whether there is a batch at all (tf.distribute does so where a dataset can end), and
wait for each other over it. So what the data took ends with the local batch, and own work begins with the agreed one.
A step that takes several batches outside of a function, to accumulate its gradients, has waited for all of them.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keepstep_worker import fingerprint
from keepstep_worker.waits import Waits
from keepstep_worker.wire import StepRecord, StepTimes

_OPTIMIZERS = (("BaseOptimizer", "apply"), ("Optimizer", "apply_gradients"), ("OptimizerV2", "apply_gradients"))
"""Classes and methods that are given local gradients: Keras 3, tf_keras, and tf_keras's legacy optimizers."""

_BATCHES = (
    ("OwnedIterator", "_next_internal", "data"),
    ("_SingleWorkerDatasetIteratorBase", "get_next_as_list", "data"),
    ("_SingleWorkerDatasetIteratorBase", "get_next_as_optional_list", "data"),
    ("DistributedIteratorBase", "get_next", "begun"),
)
"""Classes and methods that give a batch: of this process's own data, or of what all ranks have agreed on."""

_AVERAGING = ("horovod.tensorflow", "smdistributed.dataparallel.tensorflow")
"""Libraries whose optimizers are given gradients that were averaged already: theirs are timed at the tape."""

_EVERY_NS, _LATEST_NS = 100_000_000, 400_000_000
"""How often the stored times are read, in the mean and at least: it takes up to 0.2 ms after a step that has filled the
caches. Some steps are left out therefore, by lot: where long and short ones take turns, a fixed pace would meet the
same kind each time, and a clock the long ones more often.
"""
_TURNS_MAX = 8
_OLDER = 0.9


class Moments(NamedTuple):
    """Moments of one step, monotonic nanoseconds; 0 where not measured.

    Attributes:
        data: the local batch was there.
        begun: all ranks had agreed on the batch; own work begins.
        gradients: the local gradients were ready.
    """

    data: int = 0
    begun: int = 0
    gradients: int = 0


class _Stamp:
    """Where a time is stored: a resource of no strategy, on this process's CPU.

    Attributes:
        handle: of a float64 variable with the time of day in seconds; None before the first trace.
        eager_ns: the same where no function was traced, monotonic.
        waits: of a batch, where no function was traced that takes it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle: Any = None
        self.eager_ns = 0
        self.waits = Waits()


class _Probe:
    """The stamps, and when a function last returned and the stamps were last read, monotonic.

    `passed` counts the steps since that read; with the one that makes it `wanted`, they are read again. `steps` and
    `steps_ns` are what was seen of late, the older the less. `off` once something went wrong: then nothing is measured
    any more.

    `turns` is how many steps a batch is divided among.
    """

    def __init__(self) -> None:
        self.stamps = {name: _Stamp(name) for name in Moments._fields}
        self.returned_ns = self.read_ns = self.passed = self.wanted = 0
        self.steps = self.steps_ns = 0.0
        self.lot = random.Random()  # the script's own generators stay as they are
        self.turns = 1
        self.off = False
        self.lock = threading.Lock()
        self.within = threading.local()


_probe = _Probe()


def install(module: Any) -> None:
    """Wrap what a module that has just been executed has of optimizers, iterators and tapes; leave others alone."""
    for name, method in _OPTIMIZERS:
        kind = getattr(module, name, None)
        if kind is not None and method in vars(kind):
            setattr(kind, method, _around_optimizer(vars(kind)[method], pairs=method == "apply_gradients"))
    for name, method, stamp in _BATCHES:
        kind = getattr(module, name, None)
        if kind is not None and method in vars(kind):
            setattr(kind, method, _around_batch(vars(kind)[method], stamp))
    function = getattr(module, "Function", None)
    if function is not None and "__call__" in vars(function):
        function.__call__ = _around_function(function.__call__)
    xla = getattr(module, "XLAControlFlowContext", None)
    if xla is not None and "RequiresUniqueFunctionRetracing" in vars(xla):
        xla.RequiresUniqueFunctionRetracing = _around_xla(xla.RequiresUniqueFunctionRetracing)
    tape = getattr(module, "GradientTape", None)
    if tape is not None and "gradient" in vars(tape):
        tape.gradient = _around_tape(tape.gradient)


def record_of(sequence: int, step: int, times: StepTimes) -> StepRecord:
    """Return the record of a step that has just ended: what was measured, and what the probe has seen of the rest."""
    seen = moments(times.start_ns)
    return StepRecord(
        sequence, step, times.start_ns, times.data_ready_ns or seen.data, times.gradients_ready_ns or seen.gradients,
        times.end_ns, seen.begun,
    )  # fmt: skip


def moments(start_ns: int) -> Moments:
    """Return the moments of the step begun at `start_ns` and ended by now; zeros where nothing was measured."""
    try:
        return _moments(start_ns) if not _probe.off else Moments()
    except Exception as error:  # whatever it is, the script's step is worth more
        _give_up(error)
        return Moments()


def _moments(start_ns: int) -> Moments:
    now_ns = time.monotonic_ns()
    gradients = _probe.stamps["gradients"]
    if gradients.handle is None and not start_ns < gradients.eager_ns <= now_ns:
        return Moments()
    if any(stamp.handle is not None for stamp in _probe.stamps.values()) and not _is_due(now_ns):
        return Moments()
    read = {name: stamp.waits.over_ns(start_ns) or _read(stamp) for name, stamp in _probe.stamps.items()}
    ready_ns = read["gradients"]
    if not start_ns < ready_ns <= time.monotonic_ns():
        return Moments()
    within = {name: at_ns if start_ns < at_ns <= ready_ns else 0 for name, at_ns in read.items()}
    return Moments(**within)


def _is_due(now_ns: int) -> bool:
    """Count one more step; whether the stamps of this one are to be read."""
    _probe.passed += 1
    passed_ns = now_ns - _probe.read_ns
    if _probe.passed < _probe.wanted and passed_ns < _LATEST_NS:
        return False
    _probe.steps = _OLDER * _probe.steps + _probe.passed
    _probe.steps_ns = _OLDER * _probe.steps_ns + min(passed_ns, _LATEST_NS)
    mean = max(1, round(_EVERY_NS * _probe.steps / max(1.0, _probe.steps_ns)))
    _probe.wanted, _probe.passed, _probe.read_ns = _draw(mean, _probe.turns), 0, now_ns
    return True


def _draw(mean: int, turns: int) -> int:
    """How many steps on the next reading is: `mean` on the average, and one more than a multiple of `turns`.

    So one reading after the other meets each place in a batch in turn. By chance, some windows would have none of the
    steps that wait for data, and a slow rank would look well in them.
    """
    return 1 + turns * int(_probe.lot.uniform(0.0, 2.0 * (mean - 1) / turns + 1.0))


def expect_turns(steps: int) -> None:
    """Say that each batch is read for so many steps: only one of them waits for it.

    Keras's `fit` divides what a dataset gives, the global batch, among as many steps of each rank as there are ranks.
    """
    _probe.turns = max(1, min(steps, _TURNS_MAX))


def is_ready(start_ns: int) -> bool | None:
    """Return whether the gradients of the step begun at `start_ns` are ready; None where that is not measured.

    May be called from any thread, while the one that trains waits for others.
    """
    stamp = _probe.stamps["gradients"]
    if _probe.off or (stamp.handle is None and not stamp.eager_ns):
        return None
    return _read(stamp) > start_ns


def returned_ns(start_ns: int) -> int:
    """Return when the last traced function of the step begun at `start_ns` came back; 0 where none did.

    What the script does behind it is the rank's own, and no waiting for others.
    """
    return _probe.returned_ns if _probe.returned_ns > start_ns else 0


def _read(stamp: _Stamp) -> int:
    """Return a stamp's time, monotonic nanoseconds."""
    if stamp.handle is None:
        return stamp.eager_ns
    import tensorflow as tf

    stored_s = float(tf.raw_ops.ReadVariableOp(resource=stamp.handle, dtype=tf.float64))
    # the offset of the two clocks is taken anew each time, so that a clock that was set spoils one step at most
    return max(stamp.eager_ns, int(stored_s * 1e9) - time.time_ns() + time.monotonic_ns())


# --- where the stamps are put ----------------------------------------------------------------------------------------


def _around_optimizer(original: Callable[..., Any], pairs: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **keywords: Any) -> Any:
        name = "grads_and_vars" if pairs else "grads"
        given = args[0] if args else keywords.get(name)
        if given is None:
            return original(self, *args, **keywords)
        gradients = list(given)  # what is given may be an iterator
        if not _averages():
            local = [gradient for gradient, _ in gradients] if pairs else gradients
            _mark("gradients", local)
            fingerprint.see(local)
        if args:
            return original(self, gradients, *args[1:], **keywords)
        return original(self, **{**keywords, name: gradients})

    return apply


def _around_tape(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gradient(self: Any, *args: Any, **keywords: Any) -> Any:
        found = original(self, *args, **keywords)
        if _averages():
            _mark("gradients", found)
        return found

    return gradient


def _around_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        found = original(self, *args, **keywords)
        _probe.returned_ns = time.monotonic_ns()
        return found

    return call


def _around_xla(original: Callable[..., bool]) -> Callable[..., bool]:
    """What was traced with stamps or fingerprints XLA can not compile: below what it does, all is traced once more."""

    @functools.wraps(original)
    def traces_anew(self: Any) -> bool:
        stamped = any(stamp.handle is not None for stamp in _probe.stamps.values())
        return original(self) or stamped or fingerprint.is_in_graphs()

    return traces_anew


def _around_batch(original: Callable[..., Any], stamp: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def following(self: Any, *args: Any, **keywords: Any) -> Any:
        if stamp == "data" and getattr(_probe.within, "batch", False):
            return original(self, *args, **keywords)
        _probe.within.batch = stamp == "data"
        begun_ns = time.monotonic_ns()
        try:
            found = original(self, *args, **keywords)
        finally:
            _probe.within.batch = False
        _mark(stamp, found)
        known = _probe.stamps[stamp]
        if known.eager_ns >= begun_ns:
            known.waits.add(begun_ns, known.eager_ns)
        return found

    return following


def _averages() -> bool:
    return any(name in sys.modules for name in _AVERAGING)


def _give_up(error: Exception) -> None:
    """Measure nothing any more, and say so once."""
    _probe.off = True
    print(f"keepstep: steps are not timed any more: {error!r}"[:500], file=sys.stderr, flush=True)


def _mark(stamp: str, structure: Any) -> None:
    """Store the time behind all tensors of a structure: in the graph that is being traced, or now."""
    try:
        if not _probe.off:
            _store(stamp, structure)
    except Exception as error:
        _give_up(error)


def _store(stamp: str, structure: Any) -> None:
    import tensorflow as tf
    from tensorflow.python.framework import config
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        _probe.stamps[stamp].eager_ns = time.monotonic_ns()
        return
    graph = tf.compat.v1.get_default_graph()
    if config.is_op_determinism_enabled() or control_flow_util.GraphOrParentsInXlaContext(graph):
        return
    if not tf.compat.v1.executing_eagerly_outside_functions():  # a graph of TensorFlow 1
        return
    leaves = tf.nest.flatten(structure, expand_composites=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    if not tensors:
        return
    place = _handle(tf, _probe.stamps[stamp])
    heads = _heads(tf, tensors) if stamp == "gradients" and tf.config.list_logical_devices("GPU") else []
    with tf.device("CPU:0"):
        # the same resource by its name: the one that is read, captured, would be a part of whatever the script exports
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name=place)
        tensors += [tf.identity(head) for head in heads]
        with tf.control_dependencies(tensors):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.timestamp())


def _heads(tf: Any, tensors: Sequence[Any]) -> list[Any]:
    """A value of the first and of the last tensor, where these are, made once all tensors are.

    A control edge fires when a GPU's kernels are enqueued, which they are in order; what is copied to the host comes
    when they are done. So it is a value that is copied, and no whole gradient.
    """
    with tf.control_dependencies(tensors):
        heads = []
        for tensor in (tensors[0], tensors[-1]):
            with tf.device(tensor.device or None):
                heads.append(tf.reshape(tensor, [-1])[:1])
        return heads


def _handle(tf: Any, stamp: _Stamp) -> str:
    """Make the stamp's resource on first use, outside of any graph and any strategy; return its name."""
    name = f"keepstep_{stamp.name}_ready"
    with _probe.lock:
        if stamp.handle is None:
            with tf.init_scope(), tf.device("CPU:0"):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name=name)
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0.0, tf.float64))
                stamp.handle = handle
    return name
