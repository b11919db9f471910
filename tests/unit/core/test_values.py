"""Values are as `dataclass(frozen=True, slots=True)` would make them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from keepstep.core.values import evolve, frozen


@frozen
class Point:
    """A point."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)
    secret: str = field(default="s", repr=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A point."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)
    secret: str = field(default="s", repr=False)


@frozen
class One:
    x: Any


@frozen
class Nothing:
    pass


MADE: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((1,), {}), ((1, 3), {}), ((), {"x": 1, "y": 4}), ((1,), {"tags": ["a"]}), ((1, 2, ["b"], "t"), {}),
)  # fmt: skip


@pytest.mark.parametrize(("args", "words"), MADE)
def test_a_value_is_what_a_dataclass_would_be(args, words):
    found, wanted = Point(*args, **words), Wanted(*args, **words)
    assert dataclasses.asdict(found) == dataclasses.asdict(wanted)
    assert repr(found) == repr(wanted).replace("Wanted", "Point")
    assert found == Point(*args, **words)
    assert found != wanted
    assert found != evolve(found, x=9)
    assert evolve(found, x=9) == dataclasses.replace(found, x=9)
    assert [pickle.loads(pickle.dumps(found)), copy.deepcopy(found)] == [found, found]
    assert Point.__slots__ == Wanted.__slots__
    assert Point.__match_args__ == Wanted.__match_args__


def test_fields_never_change_and_there_are_no_others():
    found = Point(1)
    for name in ("x", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(found, name, 5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(found, name)


@pytest.mark.parametrize("args", [(), (1, 2, [], "", 5)])
def test_arguments_are_those_of_the_fields(args):
    with pytest.raises(TypeError):
        Point(*args)
    with pytest.raises(ValueError, match="negative"):
        Point(-1)


def test_what_has_one_field_or_none_is_compared_and_hashed():
    assert (One(1) == One(1), One(1) == One(2), One(1) == Nothing()) == (True, False, False)
    assert Nothing() == Nothing()
    assert {One((1,)), One((1,)), Nothing(), Nothing()} == {One((1,)), Nothing()}
    assert One(1) != 1
    with pytest.raises(TypeError):
        hash(Point(1))  # of a list there is none


def test_each_has_tags_of_its_own():
    assert Point(1).tags is not Point(1).tags
