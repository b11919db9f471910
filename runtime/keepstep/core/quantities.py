"""Amounts as a policy writes them: durations, steps, budgets, cadences. Each parser's error says what is wanted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from keepstep.core.values import frozen

DURATION = "a duration with its unit, as 500ms, 5s, 2min or 1h"
STEPS = "a number of steps, as 10 steps"
BUDGET = "a number of restarts per time, as 8 per 1h"

_NUMBER, _UNIT = r"\d{1,9}(?:\.\d{1,9})?", r"(?:ms|s|min|h)"
_DURATION = re.compile(rf"({_NUMBER})\s*({_UNIT})", re.ASCII)
_STEPS = re.compile(r"(\d{1,12})\s*steps?", re.ASCII)
_BUDGET = re.compile(r"(\d{1,6})\s+per\s+(\S.*)", re.ASCII)
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 0.001}
_RATE = re.compile(rf"({_NUMBER})\s*(MB|GB)/s", re.ASCII)
_BYTES = {"MB": 1e6, "GB": 1e9}
_SECONDS_MAX = 366 * 86_400.0


@frozen
class Cadence:
    """How often: in steps, in seconds, or left to keepstep (both None)."""

    steps: int | None = None
    seconds: float | None = None


@frozen
class RestartBudget:
    """So many failures within a window of so many seconds."""

    count: int
    window_s: float


def parse_seconds(text: object) -> float:
    """Seconds of "500ms", "5s", "2min" or "1h", to the microsecond: so that what is shown parses to the same number.

    Raises:
        ValueError: it is none of these, or more than a year; a bare number does not say its unit.
    """
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(DURATION)
    seconds = round(float(match[1]) * _SECONDS[match[2]], 6)
    if seconds > _SECONDS_MAX:
        raise ValueError(f"{DURATION}, and a year at most")
    return seconds


def show_seconds(seconds: float) -> str:
    """The shortest text that `parse_seconds` reads as the same number."""
    for unit in ("h", "min"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds / _SECONDS[unit])}{unit}"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3f}".rstrip("0").rstrip(".") + "ms"
    text = f"{seconds:.6f}".rstrip("0").rstrip(".")
    return f"{text}s"


def parse_steps(text: object) -> int:
    """Steps of "10 steps".

    Raises:
        ValueError: it is no positive number of steps.
    """
    match = _STEPS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or int(match[1]) < 1:
        raise ValueError(STEPS)
    return int(match[1])


def show_steps(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def parse_budget(value: object) -> RestartBudget:
    """The budget of "8 per 1h".

    Raises:
        ValueError: it is none, or its window is empty.
    """
    if isinstance(value, RestartBudget):
        return value
    match = _BUDGET.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(BUDGET)
    window_s = parse_seconds(match[2])
    if window_s < 1.0:
        raise ValueError(f"{BUDGET}, with a window of 1s or more")
    return RestartBudget(int(match[1]), window_s)


def show_budget(budget: RestartBudget) -> str:
    return f"{budget.count} per {show_seconds(budget.window_s)}"


def parse_cadence(value: object) -> Cadence:
    """The cadence of "auto", "500 steps" or "2min".

    Raises:
        ValueError: it is none of these, or takes no time.
    """
    if isinstance(value, Cadence):
        return value
    if value == "auto":
        return Cadence()
    if isinstance(value, str) and "step" in value:
        return Cadence(steps=parse_steps(value))
    wanted = "auto, a number of steps as 500 steps, or a duration of 1s or more as 2min"
    return Cadence(seconds=_a_second_or_more(value, wanted))


def show_cadence(cadence: Cadence) -> str:
    if cadence.steps is not None:
        return show_steps(cadence.steps)
    return "auto" if cadence.seconds is None else show_seconds(cadence.seconds)


def parse_steps_or(word: str) -> Callable[[object], int | None]:
    """A parser of steps, or of a word that stands for None."""

    def parse(value: object) -> int | None:
        if value == word:
            return None
        try:
            return parse_steps(value)
        except ValueError as error:
            raise ValueError(f"{word}, or {error}") from None

    return parse


def parse_rate(value: object) -> float | None:
    """Bytes per second of "200MB/s"; None for "off".

    Raises:
        ValueError: it is neither, or less than 1MB/s.
    """
    if value == "off":
        return None
    if isinstance(value, float) and _is_at_least(_BYTES["MB"], value):
        return value
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or float(match[1]) * _BYTES[match[2]] < _BYTES["MB"]:
        raise ValueError("off, or bytes per second of 1MB/s or more, as 200MB/s")
    return float(match[1]) * _BYTES[match[2]]


def show_rate(bytes_per_s: float | None) -> str:
    return "off" if bytes_per_s is None else f"{bytes_per_s / _BYTES['MB']:.6f}".rstrip("0").rstrip(".") + "MB/s"


def parse_deadline(value: object) -> str | float:
    """Seconds, or a word that stands for some or none.

    Raises:
        ValueError: it is neither, or less than a second.
    """
    if (isinstance(value, float) and _is_at_least(1.0, value)) or (isinstance(value, str) and value in ("auto", "off")):
        return value
    return _a_second_or_more(value, "auto, off, or a duration of 1s or more as 2min")


def parse_seconds_or_off(value: object) -> float | None:
    """Seconds; None for "off".

    Raises:
        ValueError: it is neither, or less than a second.
    """
    if value == "off":
        return None
    if isinstance(value, float) and _is_at_least(1.0, value):
        return value
    return _a_second_or_more(value, "off, or a duration of 1s or more as 6h")


def _is_at_least(least: float, value: float) -> bool:
    """Whether a number that was read already, or stands there without a unit, may be what is wanted."""
    return math.isfinite(value) and value >= least


def _a_second_or_more(value: object, wanted: str) -> float:
    """Seconds, where it is a duration of one or more; a ValueError that says what is wanted where it is not."""
    try:
        seconds = parse_seconds(value)
    except ValueError:
        seconds = 0.0
    if seconds < 1.0:
        raise ValueError(wanted)
    return seconds


def parse_folder(value: str) -> str:
    """A folder: a word that stands for one or none, or an absolute path."""
    if value not in ("auto", "off") and (not value.startswith("/") or "\0" in value):
        raise ValueError("auto, off, or the absolute path of a folder")
    return value


Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    PlainSerializer(show_seconds, return_type=str),
    WithJsonSchema({"type": "string", "pattern": rf"^{_NUMBER} ?{_UNIT}$"}),
]
SecondsAutoOrOff = Annotated[
    Literal["auto", "off"] | float,
    BeforeValidator(parse_deadline),
    PlainSerializer(lambda value: show_seconds(value) if isinstance(value, float) else value, return_type=str),
    WithJsonSchema({"type": "string", "pattern": rf"^(auto|off|{_NUMBER} ?{_UNIT})$"}),
]
Budget = Annotated[
    RestartBudget,
    BeforeValidator(parse_budget),
    PlainSerializer(show_budget, return_type=str),
    WithJsonSchema({"type": "string", "pattern": rf"^\d+ per {_NUMBER} ?{_UNIT}$"}),
]
Every = Annotated[
    Cadence,
    BeforeValidator(parse_cadence),
    PlainSerializer(show_cadence, return_type=str),
    WithJsonSchema({"type": "string", "pattern": rf"^(auto|\d+ ?steps?|{_NUMBER} ?{_UNIT})$"}),
]
StepsOrAuto = Annotated[
    int | None,
    BeforeValidator(parse_steps_or("auto")),
    PlainSerializer(lambda steps: "auto" if steps is None else show_steps(steps), return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(auto|\d+ ?steps?)$"}),
]
StepsOrOff = Annotated[
    int | None,
    BeforeValidator(parse_steps_or("off")),
    PlainSerializer(lambda steps: "off" if steps is None else show_steps(steps), return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(off|\d+ ?steps?)$"}),
]
SecondsOrOff = Annotated[
    float | None,
    BeforeValidator(parse_seconds_or_off),
    PlainSerializer(lambda seconds: "off" if seconds is None else show_seconds(seconds), return_type=str),
    WithJsonSchema({"type": "string", "pattern": rf"^(off|{_NUMBER} ?{_UNIT})$"}),
]
RateOrOff = Annotated[
    float | None,
    BeforeValidator(parse_rate),
    PlainSerializer(show_rate, return_type=str),
    WithJsonSchema({"type": "string", "pattern": rf"^(off|{_NUMBER} ?(MB|GB)/s)$"}),
]
