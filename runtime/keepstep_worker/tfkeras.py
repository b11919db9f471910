"""tf_keras, and Keras 2 before it: its `fit` instrumented. It needs no repair."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from keepstep_worker import draws, orders
from keepstep_worker.fit import active, instrument
from keepstep_worker.fit_state import tensorflow_generator
from keepstep_worker.training import optimizers_of, unlisted


def install(module: Any) -> None:
    """Make `fit` report to the agent.

    Args:
        module: `tf_keras.src.engine.training` or its like in Keras 2, already executed.
    """
    callbacks = module.callbacks_module
    instrument(module.Model, callbacks.CallbackList, _TfKeras(callbacks))
    _begin_at_epoch(module.Model)
    _read_past_epochs_again(module.data_adapter)
    draws.observe(module.data_adapter, "KerasSequenceAdapter", active)


class _TfKeras:
    """What `fit` needs to know of tf_keras."""

    kind = "tf_keras"

    def __init__(self, callbacks: Any) -> None:
        self.callback, self.history = callbacks.Callback, callbacks.History

    def replicated(self, model: Any) -> list[Any]:
        return _existing(model, "trainable_variables")

    def local(self, model: Any) -> list[Any]:
        variables = _existing(model, "variables")
        for metric in model.metrics:
            variables += metric.variables
        for layer in model._flatten_layers():
            generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)
            if generator is not None:
                variables.append(generator.state)
        return [*variables, model._train_counter, *unlisted(model)]

    def optimizer(self, model: Any) -> list[Any]:
        variables: list[Any] = []
        for optimizer in optimizers_of(model):
            listed = optimizer.variables
            variables += listed() if callable(listed) else listed
            for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                rates = [getattr(each, "_learning_rate", None), getattr(each, "_current_learning_rate", None)]
                rates += getattr(each, "_hyper", {}).values()
                scale = getattr(each, "_loss_scale", None)
                rates += [getattr(scale, name, None) for name in ("_current_loss_scale", "_counter")]
                variables += [rate for rate in rates if hasattr(rate, "assign")]
        return variables

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        """Leave the arguments alone: the data is made for as many epochs as they say."""

    def execution_steps(self, model: Any) -> int:
        steps = getattr(model, "_steps_per_execution", None)
        return int(steps.numpy()) if steps is not None else 1

    def generators(self, wanted: Iterable[str] = ()) -> dict[str, Any]:
        return tensorflow_generator("tensorflow" in set(wanted))


def _existing(model: Any, kind: str) -> list[Any]:
    """Return a model's variables, none where they are created by its first call, which is still to come."""
    try:
        return list(getattr(model, kind))
    except ValueError:
        return []


def _begin_at_epoch(owner: Any) -> None:
    """Make a resumed fit begin in its position's epoch, with its data made for all epochs."""
    original = owner._maybe_load_initial_counters_from_ckpt

    @functools.wraps(original)
    def load_initial_counters(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(self, *args, **kwargs)
        fit = active()
        return loaded if fit is None or fit.resume is None else (fit.resume.epoch, 0)

    owner._maybe_load_initial_counters_from_ckpt = load_initial_counters


def _read_past_epochs_again(adapters: Any) -> None:
    """Make the data handler, in a resumed fit, take up the data where the epochs before left it."""
    handlers = adapters.DataHandler
    epochs_of, steps_of = handlers.enumerate_epochs, handlers.steps

    @functools.wraps(epochs_of)
    def enumerate_epochs(self: Any) -> Iterator[Any]:
        fit, dataset = active(), _dataset(self)
        renews = self._adapter.should_recreate_iterator()
        if fit is not None and fit.resume is not None:
            orders.catch_up(dataset, fit.orders, ahead=1 + renews)
        orders.note_iterator(dataset)
        self._keepstep_unread = True
        for epoch, iterator in epochs_of(self):
            if renews:
                orders.note_iterator(dataset)
                self._keepstep_unread = True
            self._keepstep_iterator = iterator
            yield epoch, iterator

    @functools.wraps(steps_of)
    def steps(self: Any) -> Iterator[int]:
        fit, epochs = active(), 0
        if fit is not None:
            goes_on = not self._adapter.should_recreate_iterator()
            if isinstance(self._adapter, adapters.TensorLikeDataAdapter) and self._steps_per_epoch is None:
                goes_on = bool(self._adapter._shuffle)  # else the arrays, whole, in each epoch
            iterate = functools.partial(orders.begin, _dataset(self), self._dataset)
            epochs, self._inferred_steps = fit.before_batches(iterate, self._inferred_steps, goes_on, self._adapter)
        if self._keepstep_unread:
            orders.note_reading(_dataset(self))
            self._keepstep_unread = False
        if epochs:
            orders.advance(self._keepstep_iterator, epochs * self._inferred_steps)
        yield from steps_of(self)

    handlers.enumerate_epochs, handlers.steps = enumerate_epochs, steps


def _dataset(handler: Any) -> Any:
    """Return the `tf.data.Dataset` that a data handler was given, None where it was given something else."""
    return getattr(handler._adapter, "_dataset", None)
