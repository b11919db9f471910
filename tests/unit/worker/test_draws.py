"""What orders a `PyDataset`: drawn again in a new process as it was, whatever was drawn in between."""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from keepstep_worker import draws, fit_state
from keepstep_worker.draws import Draws

BATCHES = 20


class PyDataset:
    """As Keras's: its own hooks do nothing."""

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...


PyDataset.__module__ = "keras.src.trainers.data_adapters.py_dataset_adapter"


class Samples(PyDataset):
    def __init__(self) -> None:
        self.order = list(range(BATCHES))

    def on_epoch_end(self) -> None:
        random.shuffle(self.order)


class Adapter:
    """As Keras's: it calls the hooks of what it reads."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def on_epoch_begin(self) -> None:
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.data.on_epoch_end()


class Fit:
    """A fit of a script that begins anew, with Keras's loop around it."""

    def __init__(self, data: Any, encoded: bytes | None = None) -> None:
        self.draws = Draws(data)
        self.draws.load(encoded)
        self.data, self.module = data, ModuleType("data_adapter")
        self.module.random = random  # type: ignore[attr-defined]
        self.module.Adapter = type("Adapter", (Adapter,), {})  # type: ignore[attr-defined]
        draws.observe(self.module, "Adapter", lambda: self)
        self.adapter = self.module.Adapter(data)

    def epoch(
        self, number: int, ends: bool = True, goes_on: bool = False, past: int = 0
    ) -> tuple[list[int], list[int]]:
        """Read an epoch's data; returns the orders of its batches and of the samples."""
        self.draws.begin(self.adapter, number, goes_on)
        self.draws.again(past)
        self.adapter.on_epoch_begin()
        batches = list(range(BATCHES))
        self.module.random.shuffle(batches)
        samples = list(getattr(self.data, "order", ()))
        random.random()  # others draw, too
        if ends:
            self.adapter.on_epoch_end()
        return batches, samples


@pytest.fixture(autouse=True)
def _python_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy and TensorFlow are not at hand here."""

    def state() -> dict[str, Any]:
        return {"python": fit_state._pack(random.getstate())}

    def restore(state: dict[str, Any]) -> None:
        random.setstate(fit_state._unpack(state["python"]))

    monkeypatch.setattr(fit_state, "random_state", state)
    monkeypatch.setattr(fit_state, "restore_random_state", restore)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_new_process_draws_each_order_again(goes_on: bool) -> None:
    random.seed(1)
    first = Fit(Samples())
    wanted = [first.epoch(number, ends=number < 3, goes_on=goes_on) for number in range(4)]
    random.seed(2)
    second = Fit(Samples(), first.draws.encoded)
    if goes_on:
        found = [second.epoch(number, ends=number < 3, goes_on=True) for number in range(4)]
    else:
        found = [second.epoch(3, ends=False, past=3)]
    assert found == wanted[-len(found) :]
    assert len({tuple(order) for orders in wanted for order in orders}) == 8, "and no two are alike"


def test_of_a_fit_that_has_ended_each_hook_is_called_again_that_was_called() -> None:
    """It stopped within its third epoch, the end of which the data was not told of."""
    random.seed(1)
    first = Fit(Samples())
    for number in range(3):
        first.epoch(number, ends=number < 2)
    random.seed(2)
    second = Fit(Samples(), first.draws.encoded)
    second.draws.again()
    assert second.data.order == first.data.order


def test_it_is_as_without_keepstep() -> None:
    random.seed(1)
    fit = Fit(Samples())
    found = [fit.epoch(number) for number in range(3)]
    random.seed(1)
    data, wanted = Samples(), []
    for _ in range(3):
        batches = list(range(BATCHES))
        random.shuffle(batches)
        wanted.append((batches, list(data.order)))
        random.random()
        data.on_epoch_end()
    assert found == wanted


def test_a_batch_that_is_read_before_the_epoch_begins_takes_nothing_of_its_order() -> None:
    """As where Keras builds a model on several hosts, which it does again when the script starts anew."""

    def train(seed: int, encoded: bytes | None = None) -> tuple[Fit, list[int]]:
        random.seed(seed)
        fit = Fit(Samples(), encoded)
        fit.module.random.shuffle([*range(BATCHES)])
        return fit, fit.epoch(0, ends=False)[0]

    first, wanted = train(1)
    assert train(2, first.draws.encoded)[1] == wanted


def test_a_batch_that_is_read_to_build_the_model_before_the_state_is_put_back_is_of_no_order() -> None:
    random.seed(1)
    first = Fit(Samples())
    first.draws.aside(lambda: first.module.random.shuffle([*range(BATCHES)]))
    wanted = first.epoch(0, ends=False)
    random.seed(2)
    assert Fit(Samples(), first.draws.encoded).epoch(0, ends=False) == wanted


def test_of_orders_that_are_over_nothing_is_kept() -> None:
    fit = Fit(Samples())
    for number in range(3):
        fit.epoch(number)
    assert {key.rpartition(" ")[0] for key in fit.draws._states} == {"shuffle 2", "on_epoch_end"}


def test_the_hooks_of_what_is_no_dataset_of_keras_are_not_called() -> None:
    class Other:
        def on_epoch_end(self) -> None:
            raise AssertionError("Keras does not call it either")

    for data in (Other(), PyDataset()):
        fit = Fit(data)
        fit.draws.begin(fit.adapter, 0, goes_on=False)
        fit.draws.again(3)
        fit.draws.again()


def test_a_validation_of_other_data_is_left_alone() -> None:
    fit = Fit(Samples())
    fit.epoch(0, ends=False)
    before = fit.draws.encoded
    fit.module.Adapter(Samples()).on_epoch_end()
    assert fit.draws.encoded == before


def test_without_a_fit_python_shuffles() -> None:
    module = SimpleNamespace(random=random, Adapter=type("Adapter", (Adapter,), {}))
    draws.observe(module, "Adapter", lambda: None)  # type: ignore[arg-type]
    data = Samples()
    module.Adapter(data).on_epoch_end()
    assert sorted(data.order) == list(range(BATCHES)) != data.order
    module.random.seed(5)
    module.random.shuffle(found := list(range(BATCHES)))
    random.Random(5).shuffle(wanted := list(range(BATCHES)))
    assert found == wanted
