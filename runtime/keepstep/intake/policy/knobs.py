"""The knobs of the policy's tree by their dotted names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keepstep.core.policy import Policy
from keepstep.core.values import frozen


@frozen
class Knob:
    """One knob, as people are told about it."""

    path: tuple[str, ...]
    description: str
    unit: str
    range: str
    failure: str

    @property
    def name(self) -> str:
        return ".".join(self.path)


def knobs(model: type[BaseModel] = Policy, above: tuple[str, ...] = ()) -> Iterator[Knob]:
    """Every knob below a section, in the order of the tree."""
    for name, field in model.model_fields.items():
        path = (*above, name)
        section = section_of(field)
        if section is not None:
            yield from knobs(section, path)
        else:
            extra: Any = field.json_schema_extra
            yield Knob(path, field.description or "", extra["unit"], extra.get("range", ""), extra["failure"])


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section behind a field; None where it is a knob."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def section_at(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The section that a path leads to; None where it leads to a knob or into nothing."""
    model: type[BaseModel] = Policy
    for name in path:
        field = model.model_fields.get(name) if isinstance(name, str) else None
        section = None if field is None else section_of(field)
        if section is None:
            return None
        model = section
    return model
