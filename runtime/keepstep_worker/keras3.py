"""Keras 3 on the TensorFlow backend: its `fit` repaired where a probe finds it broken, and instrumented.

Source: Keras 3.15.1 with TensorFlow 2.21 on two hosts fails in two functions of
`keras/src/backend/tensorflow/trainer.py`. `_maybe_symbolic_build` hands a whole batch structure to `strategy.reduce`,
which takes one value; `reduce_per_replica` asks for a mean along axis 0 of scalars. Both are replaced only while a
multi-worker strategy is in use, and only after the function itself, run against a strategy that merely records, has
shown the fault.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keepstep_worker import draws, orders
from keepstep_worker.fit import active, instrument
from keepstep_worker.fit_state import tensorflow_generator
from keepstep_worker.training import optimizers_of, unlisted, variables_among


def install(module: Any) -> None:
    """Make `fit` of Keras 3 work on several hosts and report to the agent.

    Args:
        module: `keras.src.backend.tensorflow.trainer`, already executed.
    """
    repair(module)
    callbacks = module.callbacks_module
    instrument(module.TensorFlowTrainer, callbacks.CallbackList, _Keras3(callbacks))
    _read_past_epochs_again(module.TFEpochIterator)
    adapters = sys.modules.get("keras.src.trainers.data_adapters.py_dataset_adapter")  # which the trainer has imported
    if adapters is not None:
        draws.observe(adapters, "PyDatasetAdapter", active)


def repair(module: Any) -> None:
    """Put the two guarded replacements in place; a strategy of one host never notices them."""
    trainer = module.TensorFlowTrainer
    build, reduce = trainer._maybe_symbolic_build, module.reduce_per_replica
    build_is_broken = functools.lru_cache(maxsize=1)(functools.partial(_builds_from_a_structure, module, build))
    reduce_is_broken = functools.lru_cache(maxsize=1)(functools.partial(_reduces_scalars_by_axis, module, reduce))

    @functools.wraps(build)
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is None or not _spans_hosts(module.tf, self._distribute_strategy) or not build_is_broken():
            return build(self, iterator=iterator, data_batch=data_batch)
        return build(self, data_batch=_first_local_batch(module, self._distribute_strategy, iterator))

    @functools.wraps(reduce)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not _spans_hosts(module.tf, strategy) or not reduce_is_broken():
            return reduce(values, strategy, reduction)
        return module.tree.map_structure(functools.partial(_local_mean, module.tf, strategy), values)

    trainer._maybe_symbolic_build = maybe_symbolic_build
    module.reduce_per_replica = reduce_per_replica


def _spans_hosts(tf: Any, strategy: Any) -> bool:
    """Whether this is a MultiWorkerMirroredStrategy with more than one worker."""
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and bool(strategy.extended._in_multi_worker_mode())


def _first_local_batch(module: Any, strategy: Any, iterator: Any) -> Any:
    """One batch as the first local replica sees it: its shapes and types are all that a symbolic build needs."""
    for _, _, batches in iterator:
        return module.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], next(batches))
    return None


def _local_mean(tf: Any, strategy: Any, value: Any) -> Any:
    """The mean of this host's replicas: none is left out, since metrics are summed over all hosts when updated."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return value
    return tf.reduce_mean(strategy.experimental_local_results(value), axis=0)


# --- the probes ---------------------------------------------------------------------------------------------------


def _builds_from_a_structure(module: Any, build: Callable[..., Any]) -> bool:
    """Whether `_maybe_symbolic_build` passes more than one value to `strategy.reduce` at a time."""
    from tensorflow.python.distribute.values import PerReplica

    strategy = _recording_strategy(module.tf)
    batch = tuple(PerReplica((module.tf.zeros((2, 1)),)) for _ in range(2))
    trainer = _Trainer(strategy)
    _quietly("_maybe_symbolic_build", lambda: build(trainer, iterator=iter([(0, 0, iter([batch]))])))
    return any(not isinstance(value, PerReplica) for value, _ in strategy.reduced)


def _reduces_scalars_by_axis(module: Any, reduce: Callable[..., Any]) -> bool:
    """Whether `reduce_per_replica` names an axis when it reduces a scalar, which has none."""
    strategy = _recording_strategy(module.tf)
    _quietly("reduce_per_replica", lambda: reduce(module.tf.constant(1.0), strategy, "mean"))
    return any(axis is not None for _, axis in strategy.reduced)


def _quietly(name: str, call: Callable[[], Any]) -> None:
    """Run a probe: what the function does beyond reducing may fail against a strategy of straw, and says nothing."""
    try:
        call()
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        print(f"keepstep: Keras's {name} did not finish its probe: {error!r}", file=sys.stderr)


class _Trainer:
    """As much of a trainer as `_maybe_symbolic_build` looks at."""

    def __init__(self, strategy: Any) -> None:
        self._distribute_strategy = self.distribute_strategy = strategy

    def _symbolic_build(self, data_batch: Any = None, iterator: Any = None) -> None:
        del data_batch, iterator


class _Extended:
    """As much of a strategy's `extended` as Keras asks about."""

    def _in_multi_worker_mode(self) -> bool:
        return True


def _recording_strategy(tf: Any) -> Any:
    """A strategy of the multi-worker type that starts no server and notes what it is asked to reduce."""

    class Recording(tf.distribute.MultiWorkerMirroredStrategy):
        reduced: list[Any]

        def __init__(self) -> None:
            self.reduced = []

        @property
        def extended(self) -> Any:
            return _Extended()

        @contextlib.contextmanager
        def scope(self) -> Iterator[None]:
            yield

        def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
            del reduce_op
            self.reduced.append((value, axis))
            return value

        def experimental_local_results(self, value: Any) -> Any:
            return getattr(value, "values", (value,))

    return Recording()


# --- fit --------------------------------------------------------------------------------------------------------------


class _Keras3:
    """What `fit` needs to know of Keras 3."""

    kind = "keras3"

    def __init__(self, callbacks: Any) -> None:
        self.callback, self.history = callbacks.Callback, callbacks.History

    def replicated(self, model: Any) -> Any:
        return model.trainable_variables

    def local(self, model: Any) -> list[Any]:
        listed = [*model.variables, *model.non_trainable_variables, *model.metrics_variables]
        return [*listed, *unlisted(model), *variables_among(model)]

    def optimizer(self, model: Any) -> list[Any]:
        return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        arguments["initial_epoch"] = epoch

    def execution_steps(self, model: Any) -> int:
        return int(model.steps_per_execution)

    def generators(self, wanted: Iterable[str] = ()) -> dict[str, Any]:
        from keras.src.backend.common import global_state
        from keras.src.random import seed_generator

        found = tensorflow_generator("tensorflow" in (names := set(wanted)))
        name = seed_generator.GLOBAL_SEED_GENERATOR
        if "keras" in names or global_state.get_global_attribute(name) is not None:
            found["keras"] = seed_generator.global_seed_generator().state
        return found


def _read_past_epochs_again(iterators: Any) -> None:
    """Make the iterator over epochs, in a resumed fit, take up the data where the epochs before left it."""
    name = "_enumerate_iterator" if hasattr(iterators, "_enumerate_iterator") else "enumerate_epoch"
    original, get_iterator = getattr(iterators, name), iterators._get_iterator

    @functools.wraps(get_iterator)
    def get_counted_iterator(self: Any) -> Any:
        orders.note_iterator(_dataset(self))
        return get_iterator(self)

    @functools.wraps(original)
    def enumerate_again(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        fit, epochs, goes_on = active(), 0, bool(self.steps_per_epoch)
        if fit is not None:
            iterate = functools.partial(orders.begin, _dataset(self), get_iterator(self))
            epochs, self._num_batches = fit.before_batches(iterate, self._num_batches, goes_on, self.data_adapter)
        if not goes_on or getattr(self, "_current_iterator", None) is None:
            orders.note_reading(_dataset(self))
        for _ in range(epochs):
            with self.catch_stop_iteration():
                for *_, iterator in original(self, *args, **kwargs):
                    orders.advance(iterator, self.steps_per_execution)
        yield from original(self, *args, **kwargs)

    iterators._get_iterator = get_counted_iterator
    setattr(iterators, name, enumerate_again)


def _dataset(iterators: Any) -> Any:
    """Return the `tf.data.Dataset` that an iterator over epochs was given, None where it was given something else."""
    return getattr(iterators.data_adapter, "_dataset", None)
