"""Values that never change: how their classes are made, and copies of them with some fields replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

V = TypeVar("V")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[V]) -> type[V]:
    """Make a class of values, as `dataclass(frozen=True, slots=True)` does, in less than half the time.

    That one compiles six functions for each class, and an agent has some 250 such classes, which all have to be made
    before it begins. Here it is one function, compiled for the first of its values; the others are closures.
    """
    made: Any = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    names = names_of(made)
    read: Callable[[Any], tuple[Any, ...]] = (
        attrgetter(*names) if len(names) > 1 else lambda one: tuple(getattr(one, name) for name in names)
    )

    def equals(self: Any, other: Any) -> bool:
        return read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented

    secret = {each.name for each in fields(made) if not each.repr}

    def shown(self: Any) -> str:
        pairs = zip(names, read(self), strict=True)
        told = ", ".join(f"{name}={value!r}" for name, value in pairs if name not in secret)
        return f"{type(self).__qualname__}({told})"

    methods: dict[str, Callable[..., Any]] = {
        "__init__": _initialiser_on_demand(made),
        "__eq__": equals,
        "__hash__": lambda self: hash(read(self)),
        "__repr__": shown,
        "__reduce__": lambda self: (type(self), read(self)),
        "__setattr__": _refuse,
        "__delattr__": _refuse,
    }
    for name, method in methods.items():
        if name not in cls.__dict__ or (name == "__hash__" and cls.__dict__[name] is None):
            setattr(made, name, method)
    return made  # type: ignore[no-any-return]


def names_of(made: Any) -> tuple[str, ...]:
    """The names of a class's fields, in order."""
    return tuple(each.name for each in fields(made))


def _initialiser_on_demand(made: Any) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made.__init__ = _initialiser(made)
        made.__init__(self, *args, **kwargs)

    return __init__


def _initialiser(made: Any) -> Callable[..., None]:
    """Compile the `__init__` of a class with slots: it puts each argument, or its default, into its slot."""
    known: dict[str, Any] = {"_MISSING": MISSING}
    words, lines, hints = ["self"], [], {}
    for each in fields(made):
        name, word, value = each.name, each.name, each.name
        known[f"_put_{name}"] = getattr(made, name).__set__
        hints[name] = each.type
        if each.default is not MISSING:
            known[f"_default_{name}"] = each.default
            word = f"{name}=_default_{name}"
        elif each.default_factory is not MISSING:
            known[f"_make_{name}"] = each.default_factory
            word, value = f"{name}=_MISSING", f"_make_{name}() if {name} is _MISSING else {name}"
        words.append(word)
        lines.append(f"  _put_{name}(self, {value})")
    lines += ["  self.__post_init__()"] if hasattr(made, "__post_init__") else []
    text = f" def __init__({', '.join(words)}):\n" + "\n".join(lines or ["  pass"])
    found: dict[str, Any] = {}
    exec(f"def _with({', '.join(known)}):\n{text}\n return __init__", vars(sys.modules[made.__module__]), found)
    initialiser: Callable[..., None] = found["_with"](**known)
    initialiser.__annotations__ = {**hints, "return": None}
    initialiser.__qualname__ = f"{made.__qualname__}.__init__"
    return initialiser


def _refuse(self: Any, name: str, value: Any = None) -> None:
    raise FrozenInstanceError(f"cannot change field {name!r} of {type(self).__qualname__}")


def evolve(value: V, **changes: Any) -> V:
    """`dataclasses.replace` for the slotted dataclasses of the core, several times as fast: a turn does little else."""
    new = copy_of(value)
    for name, changed in changes.items():
        object.__setattr__(new, name, changed)
    return new


def copy_of(value: V) -> V:
    """A copy of a slotted dataclass, equal and apart."""
    cls: type = type(value)
    new: V = object.__new__(cls)
    for put, get in _fields_of(cls):
        put(new, get(value))
    return new


@cache
def _fields_of(cls: type) -> tuple[tuple[Callable[[Any, Any], None], Callable[[Any], Any]], ...]:
    slots = [cls.__dict__[name] for name in cls.__slots__]  # type: ignore[attr-defined]
    return tuple((slot.__set__, slot.__get__) for slot in slots)
