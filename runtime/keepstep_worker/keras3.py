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
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import Iterator


def install(module: Any) -> None:
    """Make `fit` of Keras 3 work on several hosts and report to the agent.

    Args:
        module: `keras.src.backend.tensorflow.trainer`, already executed.
    """
    repair(module)


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
