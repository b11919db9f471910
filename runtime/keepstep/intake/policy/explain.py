"""What a policy says, knob by knob, for people and for editors."""

from __future__ import annotations

from typing import Any

from keepstep.core.policy import Policy
from keepstep.intake.policy.knobs import knobs
from keepstep.intake.policy.load import SourcedPolicy

_HEAD = ("knob", "value", "unit", "default", "set in", "for")
_DEFAULT = "default"


def explain(sourced: SourcedPolicy) -> str:
    """A table: knob, value, unit and range, default, where it was set, the failure it is for."""
    values, defaults = sourced.policy.model_dump(mode="json"), Policy().model_dump(mode="json")
    rows = [_HEAD]
    for knob in knobs():
        origin = sourced.origins.written(knob.path)
        unit = f"{knob.unit}, {knob.range}" if knob.range else knob.unit
        value, default = _text(_at(values, knob.path)), _text(_at(defaults, knob.path))
        where = _DEFAULT if origin is None else str(origin)
        rows.append((knob.name, value[0], unit, default[0], where, knob.failure))
        width = max(len(value), len(default))
        for more, less in zip(_padded(value, width)[1:], _padded(default, width)[1:], strict=True):
            rows.append(("", more, "", less, "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """The policy's JSON Schema, for editors."""
    schema = Policy.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "keepstep policy", **schema}


def _at(values: Any, path: tuple[str, ...]) -> object:
    for name in path:
        values = values[name]
    return values


def _text(value: object) -> list[str]:
    """A value in one line, a list of rules in one line each."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [" ".join(f"{key}={part}" for key, part in rule.items() if part is not None) for rule in value]
    if isinstance(value, list):
        return [f"[{', '.join(map(str, value))}]"]
    return [str(value)]


def _padded(lines: list[str], width: int) -> list[str]:
    return lines + [""] * (width - len(lines))
