"""What a refused policy is told: file, line, key, what was found, what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from keepstep.core.contradictions import Contradiction
from keepstep.core.policy import FailureRule
from keepstep.errors import ConfigError
from keepstep.intake.files import printable, show
from keepstep.intake.policy.knobs import knobs, section_at
from keepstep.intake.policy.origins import Origins, Place, dotted

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "greater_than_equal": "",
    "less_than_equal": "",
}
_MORE_MAX = 5


def complain(error: ValidationError, values: Mapping[str, Any], origins: Origins) -> ConfigError:
    """The first complaint in the order of the file; the others are named in its hint."""
    by_path: dict[Place, list[Any]] = {}
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        place = _place_of(cause.key) if isinstance(cause, Contradiction) else _existing(detail, values)
        by_path.setdefault(place, []).append(detail)
    inner = {place[:length] for place in by_path for length in range(len(place))}
    places = sorted(by_path.keys() - inner, key=lambda place: (origins.of(place).line or 0, place == (), dotted(place)))
    first = places[0]
    others = [dotted(place) for place in places[1:]]
    return _complaint(first, by_path[first], values, origins, others)


def unknown_key(place: Place, origins: Origins, hint_more: str = "") -> ConfigError:
    """A key that no knob has; the nearest knob stands in the hint."""
    section = section_at(place[:-1])
    if section is None and len(place) > 2 and place[0] == "failures":
        section = FailureRule
    known = list(section.model_fields) if section is not None else []
    near = get_close_matches(str(place[-1]), known, 1, 0.6)
    elsewhere = [knob.name for knob in knobs() if knob.path[-1] == place[-1]]
    hint = f"did you mean {dotted((*place[:-1], near[0]))}?" if near else ""
    if not near and elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    origin = origins.of(place)
    wanted = f"one of {', '.join(known)}" if known else "a knob's name"
    hint = "; ".join(part for part in (hint, hint_more) if part)
    return ConfigError("no such knob", wanted, file=origin.file, line=origin.line, key=dotted(place), hint=hint or None)


def _complaint(
    place: Place, details: list[Any], values: Mapping[str, Any], origins: Origins, others: list[str]
) -> ConfigError:
    more = ""
    if others:
        rest = ", ..." if len(others) > _MORE_MAX else ""
        more = f"wrong as well: {', '.join(others[:_MORE_MAX])}{rest}"
    kind, cause = details[0]["type"], details[0].get("ctx", {}).get("error")
    if kind == "extra_forbidden":
        return unknown_key(place, origins, more)
    if isinstance(cause, Contradiction):
        found, wanted = cause.found, cause.wanted
    elif kind == "missing":
        found, wanted = "the key is missing", "each rule with cause and respond"
    else:
        found = f"found {printable(origins.shown(place)) or show(_value_at(values, place))}"
        wanted = _wanted(place, details)
    origin = origins.of(place)
    return ConfigError(found, wanted, file=origin.file, line=origin.line, key=dotted(place), hint=more or None)


def _wanted(place: Place, details: list[Any]) -> str:
    words = [_wanted_by(place, detail) for detail in details]
    wanted = ", or ".join(dict.fromkeys(word for word in words if word))
    knob = next((knob for knob in knobs() if knob.path == place), None)
    limits = knob.range if knob is not None else ("1 to 255" if place[-1:] == ("exit_code",) else "")
    return ", ".join(part for part in (wanted, f"from {limits}" if limits else "") if part)


def _wanted_by(place: Place, detail: Any) -> str:
    kind = detail["type"]
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in ("literal_error", "enum"):
        return str(detail["ctx"]["expected"]).replace("'", "")
    if kind == "too_long":
        return f"{detail['ctx']['max_length']} entries at most"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        section: type[BaseModel] | None = FailureRule if place[:1] == ("failures",) else section_at(place)
        return f"a section with {', '.join(section.model_fields)}" if section is not None else "a section"
    return _WANTED.get(kind, str(detail["msg"]))


def _existing(detail: Any, values: Mapping[str, Any]) -> Place:
    """The part of a place that leads somewhere: pydantic appends the branch of a union that it tried."""
    place: list[str | int] = []
    here: object = values
    loc = detail["loc"]
    for number, part in enumerate(loc):
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        elif isinstance(here, list | dict) and isinstance(part, str) and number + 1 < len(loc):
            continue
        elif detail["type"] == "missing":
            place.append(part)
            break
        else:
            break
        place.append(part)
    return tuple(place)


def _place_of(key: str) -> Place:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _value_at(values: Mapping[str, Any], place: Place) -> object:
    here: Any = values
    for part in place:
        here = here[part]
    return here
