"""Where a fit goes on in a world of another size than the one that saved, and which variables are its state."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_worker.slab_view import RestoreError
from keepstep_worker.training import Position, Training, convert_position, optimizers_of, unlisted


def at(batch: int, size: int, **more: int) -> Position:
    return Position(**{"fit": 0, "epoch": 3, "step": 40, "begun": 0, "finished": False, **more}, batch=batch, size=size)


@pytest.mark.parametrize("worlds", [(2, 2), (0, 3)])
@pytest.mark.parametrize("size", [0, 12, 18])
def test_nothing_changes_in_the_same_world_or_where_it_is_not_known(worlds, size):
    assert convert_position(at(5, 12), worlds, size, 1) == at(5, 12)
    assert convert_position(at(5, 0), worlds, size, 1) == at(5, 0)


@pytest.mark.parametrize(
    ("batch", "size", "now", "execution_steps", "expected"),
    [
        (5, 12, 12, 1, 5),  # the global batch is the same in every world
        (4, 12, 18, 1, 6),  # a third of the epoch, of smaller batches
        (6, 18, 12, 1, 4),
        (5, 12, 18, 1, 7),  # half a batch is trained again
        (12, 12, 18, 1, 18),
        (1, 12, 6, 1, 0),
        (5, 12, 18, 3, 6),  # executions of three
        (5, 12, 12, 3, 5),
        (0, 12, 18, 1, 0),
        (0, 12, 0, 1, 0),
        (0, 0, 18, 1, 0),
    ],
)
def test_the_same_part_of_the_epoch_counts_as_trained(batch, size, now, execution_steps, expected):
    assert convert_position(at(batch, size), (3, 2), now, execution_steps) == at(expected, now)


@pytest.mark.parametrize(("size", "now"), [(0, 18), (12, 0), (0, 0)])
def test_the_middle_of_data_of_unknown_size_is_refused(size, now):
    with pytest.raises(RestoreError, match=r"batch 5 of epoch 3, was saved by 3 ranks; for 2 it .* steps_per_epoch"):
        convert_position(at(5, size), (3, 2), now, 1)


def test_a_fit_that_has_returned_goes_on_nowhere():
    assert convert_position(at(5, 0, finished=True), (3, 2), 0, 1) == at(5, 0, finished=True)


@given(
    samples=st.integers(1, 5000), local_batch=st.integers(1, 64), saved_by=st.integers(1, 8), now=st.integers(1, 8),
    part=st.floats(0, 1), execution_steps=st.integers(1, 4),
)  # fmt: skip
def test_less_than_an_execution_is_trained_again_and_no_sample_is_left_out_of_batches_of_equal_size(
    samples, local_batch, saved_by, now, part, execution_steps
):
    """Where the epoch is made of whole batches in both worlds."""
    samples *= local_batch * saved_by * now
    size, size_now = samples // (local_batch * saved_by), samples // (local_batch * now)
    position = at(int(part * size), size)
    found = convert_position(position, (saved_by, now), size_now, execution_steps)
    trained, counted = position.batch * local_batch * saved_by, found.batch * local_batch * now
    assert trained - execution_steps * local_batch * now < counted <= trained
    assert found._replace(batch=0, size=0) == position._replace(batch=0, size=0)


class Variable:
    """As much of one as is looked at. TensorFlow compares the values of two, element by element."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __eq__(self, other: object) -> bool:
        raise AssertionError("values were compared")

    __hash__ = None  # type: ignore[assignment]


class Model:
    """What a flavour finds in it is what stands here."""

    def __init__(self, *names: str) -> None:
        self.replicated = [Variable(name) for name in names]
        self.local: list[Variable] = []
        self.optimizer: list[Variable] = []


FLAVOUR: Any = types.SimpleNamespace(
    replicated=lambda model: model.replicated, local=lambda model: model.local, optimizer=lambda model: model.optimizer
)


@pytest.fixture
def training() -> Training:
    session: Any = types.SimpleNamespace(restored=lambda: None, identity=types.SimpleNamespace(world_size=1))
    return Training(session)


def keys(training: Training) -> list[str]:
    return [key for key, _ in training.named()]


def test_variables_are_named_once_while_they_are_the_same(training):
    model, other = Model("dense/kernel", "dense/bias"), Model("dense/kernel")
    training.prefixes_of(model, FLAVOUR)
    training.prefixes_of(other, FLAVOUR)
    named = training.named()
    assert training.named() is named
    assert keys(training) == [
        "replicated/model/dense/kernel", "replicated/model/dense/bias", "replicated/model2/dense/kernel",
    ]  # fmt: skip


def test_variables_that_change_in_number_class_or_identity_are_named_anew(training):
    model = Model("dense/kernel", "dense/bias")
    training.prefixes_of(model, FLAVOUR)
    assert keys(training) == ["replicated/model/dense/kernel", "replicated/model/dense/bias"]
    model.optimizer = [Variable("adam/iteration")]  # made by the first step
    assert keys(training)[2:] == ["replicated/optimizer/adam/iteration"]
    model.local.append(model.replicated.pop(0))  # frozen
    assert keys(training)[:2] == ["replicated/model/dense/bias", "local/model/dense/kernel"]
    model.local[0] = Variable("dense/kernel")
    assert dict(training.named())["local/model/dense/kernel"] is model.local[0]
    model.replicated.append(model.local[0])  # stands in both lists, as one that was thawed may
    assert keys(training)[:2] == ["replicated/model/dense/bias", "replicated/model/dense/kernel"]


def test_variables_of_a_model_that_is_no_more_are_not_saved(training):
    models = [Model("kept"), Model("dropped"), Model("kept")]
    for model in models:
        training.prefixes_of(model, FLAVOUR)
    assert len(training.named()) == 3
    del models[1], model
    assert keys(training) == ["replicated/model/kept", "replicated/model3/kept"]


class Optimizer:
    """What Keras takes for one."""

    variables: tuple[Any, ...] = ()

    def apply_gradients(self) -> None:
        raise AssertionError("it is only looked at")


def made_of(layers: list[Any], **attributes: Any) -> Any:
    return types.SimpleNamespace(_flatten_layers=lambda: layers, **attributes)


class Trained(types.SimpleNamespace):
    """A model that says itself how it is trained."""

    def train_step(self) -> None:
        raise AssertionError("it is only looked at")


def test_optimizers_are_found_wherever_a_model_keeps_them():
    first, second, third, fourth, fifth = (Optimizer() for _ in range(5))
    part = types.SimpleNamespace(optimizer=fourth)
    layers = [types.SimpleNamespace(), part, types.SimpleNamespace(optimizer=None)]
    own = {"optimizer": first, "own": [second, 3], "named": {"a": third}, "part": part, "alone": fifth, "b": (first,)}
    model = Trained(_flatten_layers=lambda: layers, **own)
    assert {id(each) for each in optimizers_of(model)} == {id(each) for each in (first, second, third, fourth, fifth)}
    assert len(optimizers_of(model)) == 5
    assert optimizers_of(model)[0] is first
    assert fourth not in optimizers_of(made_of(layers, **own)), "Keras's own step does not use it"


def test_what_a_model_holds_that_is_large_is_no_optimizer():
    assert optimizers_of(types.SimpleNamespace(data=[Optimizer()] * 100_000)) == []


def test_states_of_layers_and_of_generators_are_found_that_no_list_has():
    def assigned() -> Any:
        return types.SimpleNamespace(assign=None)

    states, generator = [assigned() for _ in range(3)], types.SimpleNamespace(make_seeds=None, state=assigned())
    layers = [
        types.SimpleNamespace(stateful=True, states=[states[0], (states[1], states[2])]),
        types.SimpleNamespace(stateful=False, states=[assigned()]),
        types.SimpleNamespace(stateful=True, states=None),
        types.SimpleNamespace(stateful=True, states=[None]),
    ]
    assert unlisted(made_of(layers, noise=generator, other=3)) == [*states, generator.state]
    assert unlisted(types.SimpleNamespace()) == []
