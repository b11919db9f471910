"""A knob needs a failure it is for, and there are few of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

KNOBS_MAX = 58
DESCRIPTION_MIN = 20


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section behind an annotation, optional or not; a list of models is one knob, not a section."""
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((part for part in candidates if isinstance(part, type) and issubclass(part, BaseModel)), None)


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if (section := section_of(field.annotation)) is not None:
            yield from sections(section)


def knobs(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from knobs(section, f"{prefix}{name}.")


def undocumented(model: type[BaseModel]) -> set[str]:
    return {name for name, field in knobs(model) if len(field.description or "") < DESCRIPTION_MIN}


def test_the_walk_finds_every_knob():
    class Inner(BaseModel):
        model_config = ConfigDict(frozen=True)
        told: int = Field(default=1, description="Seconds that a lost host may take to come back.")
        untold: int = 1

    class Outer(BaseModel):
        inner: Inner = Inner()
        maybe: Inner | None = None
        many: list[Inner] = []

    assert [name for name, _ in knobs(Outer)] == ["inner.told", "inner.untold", "maybe.told", "maybe.untold", "many"]
    assert undocumented(Outer) == {"inner.untold", "maybe.untold", "many"}


def test_every_knob_is_documented_and_has_a_default():
    from keepstep.core.policy import Policy

    assert undocumented(Policy) == set()
    assert {name for name, field in knobs(Policy) if field.is_required()} <= {"version"}


def test_there_are_few_knobs():
    from keepstep.core.policy import Policy

    assert len(list(knobs(Policy))) <= KNOBS_MAX


def test_a_policy_is_a_value():
    """Frozen, and closed: an unknown key is an error."""
    from keepstep.core.policy import Policy

    loose = {part.__name__ for part in sections(Policy) if part.model_config.get("frozen") is not True}
    open_ = {part.__name__ for part in sections(Policy) if part.model_config.get("extra") != "forbid"}
    assert (loose, open_) == (set(), set())
