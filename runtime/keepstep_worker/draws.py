"""What orders a `PyDataset` or `Sequence` of Keras's, so that a resumed fit goes on in the order that is due.

Keras shuffles the batches when it begins to read an epoch, and many a dataset shuffles its samples in `on_epoch_end`:
draws from the process's own generators, of which nothing is left in a new process. The generators' states before each
are kept here. A resumed fit, whose dataset is new, has the hooks of the epochs before called again from these states,
and its own epoch's batches shuffled from theirs.

Not seen are draws in `__init__`, which a script that starts anew does again, and those in the threads and processes of
a `Sequence` of tf_keras's that has several workers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from keepstep_worker import codec, fit_state

_HOOKS = ("on_epoch_begin", "on_epoch_end")
_DATASETS = {"PyDataset", "Sequence"}
_KERAS = {"keras", "tf_keras"}


class Draws:
    """Of one fit.

    Attributes:
        encoded: the generators' states before each draw that a later process has to do again.
    """

    def __init__(self, data: Any) -> None:
        """Take what `fit` was given as its data, which may be anything; of a `PyDataset` draws are kept."""
        self.encoded = codec.dumps({})
        self._data, self._adapter = data, None
        self._states: dict[str, Any] = {}
        self._epoch, self._goes_on, self._is_aside = 0, False, False
        self._shuffles = self._passes = 0
        self._turns = dict.fromkeys(_HOOKS, 0)

    def load(self, encoded: bytes | None) -> None:
        """Take over what `encoded` was in an earlier process; None where that kept nothing."""
        if encoded is not None:
            self._states, self.encoded = codec.loads(encoded), encoded

    def owns(self, adapter: Any) -> bool:
        """Whether it is this fit's data that one of Keras's data adapters reads, and no validation's."""
        return adapter is not None and adapter is self._adapter

    def begin(self, adapter: Any, epoch: int, goes_on: bool) -> None:
        """Begin an epoch; no batch of it was read.

        Args:
            adapter: what Keras reads the data through.
            epoch: counted from the fit's first.
            goes_on: its data begins where that of the epoch before has ended.
        """
        self._shuffles = self._shuffles if epoch == self._epoch else 0
        self._adapter, self._epoch, self._goes_on = adapter, epoch, goes_on
        wanted = "shuffle pass " if goes_on else f"shuffle {epoch} "  # others are not done again
        self._states = {key: each for key, each in self._states.items() if key.startswith((*_HOOKS, wanted))}

    def again(self, epochs: int | None = None) -> None:
        """Call the hooks again that an earlier process has called: of so many epochs, or all."""
        for epoch in itertools.count() if epochs is None else range(epochs):
            called = [name for name in _HOOKS if f"{name} {epoch}" in self._states]
            for name in called:
                self.turn(name, getattr(self._data, name))
            if not called:
                return

    def aside(self, read: Callable[[], Any]) -> None:
        """Read data for something else than the epoch's training; what that draws is of no order."""
        self._is_aside = True
        try:
            read()
        finally:
            self._is_aside = False

    def turn(self, name: str, hook: Callable[[], None]) -> None:
        """Call the hook of an epoch's begin or end."""
        if not self._has(name):
            hook()
            return
        self._draw(f"{name} {self._turns[name]}", hook)
        self._turns[name] += 1

    def shuffle(self, shuffle: Callable[[], None]) -> None:
        """Have the numbers of the data's batches shuffled."""
        if self._is_aside:
            shuffle()
        elif self._goes_on:
            self._draw(f"shuffle pass {self._passes}", shuffle)
            self._passes += 1
        else:
            self._draw(f"shuffle {self._epoch} {self._shuffles}", shuffle)
            self._shuffles += 1

    def _draw(self, key: str, draw: Callable[[], None]) -> None:
        """Draw from the generators as they were; those that are drawn from for the first time are kept as they are."""
        if key in self._states:
            fit_state.restore_random_state(self._states[key])
            draw()
            return
        before = fit_state.random_state()
        draw()
        after = {name: codec.dumps(state) for name, state in fit_state.random_state().items()}
        self._states[key] = {name: state for name, state in before.items() if codec.dumps(state) != after.get(name)}
        self.encoded = codec.dumps(self._states)

    def _has(self, name: str) -> bool:
        """Whether the data has such a hook of its own: Keras's do nothing."""
        owners = [each for each in type(self._data).__mro__ if name in vars(each)]
        of_keras = [each.__name__ for each in type(self._data).__mro__ if _is_keras(each)]
        return not _DATASETS.isdisjoint(of_keras) and bool(owners) and not _is_keras(owners[0])


def observe(module: Any, adapter: str, active: Callable[[], Any]) -> None:
    """Have a fit under way keep what its data is ordered by.

    Args:
        module: that whose adapters shuffle batches, and nothing else, by Python's `random`.
        adapter: the class that calls the data's hooks.
        active: returns the `Fit` under way, None where there is none.
    """
    module.random = _Random(module.random, active)
    owner = getattr(module, adapter)
    for name in _HOOKS:
        if hasattr(owner, name):
            setattr(owner, name, _observed(name, getattr(owner, name), active))


def _is_keras(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _KERAS


def _observed(name: str, hook: Callable[[Any], None], active: Callable[[], Any]) -> Callable[[Any], None]:
    @functools.wraps(hook)
    def observed(self: Any) -> None:
        fit = active()
        if fit is None or not fit.draws.owns(self):
            hook(self)
        else:
            fit.draws.turn(name, functools.partial(hook, self))

    return observed


class _Random:
    """Python's `random`, whose `shuffle` the fit under way is told of."""

    def __init__(self, module: Any, active: Callable[[], Any]) -> None:
        self._module, self._active = module, active

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def shuffle(self, batches: Any) -> None:
        fit = self._active()
        if fit is None:
            self._module.shuffle(batches)
        else:
            fit.draws.shuffle(functools.partial(self._module.shuffle, batches))
