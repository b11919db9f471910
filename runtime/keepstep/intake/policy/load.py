"""A policy from a preset or a file, with knobs set one by one on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keepstep.core.policy import Policy
from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.files import can_be_given, printable, read_text, show
from keepstep.intake.policy.complaints import complain, unknown_key
from keepstep.intake.policy.knobs import knobs, section_at
from keepstep.intake.policy.origins import Origin, Origins, dotted
from keepstep.intake.policy.presets import preset_names, read_preset
from keepstep.intake.policy.yaml_text import TEXT_BYTES_MAX, YamlText, parse_setting, parse_yaml

VERSION = 1
SET = "--set"


@frozen
class SourcedPolicy:
    """A policy, and where each of its values was written."""

    policy: Policy
    origins: Origins


def load_policy(source: str | Path = "default", sets: Sequence[str] = ()) -> Policy:
    """Read a policy.

    Args:
        source: a preset's name, or a file.
        sets: knobs that override it, as `checkpoint.every=2min`; the last one holds.

    Raises:
        ConfigError: something in it can not be used; exit code 78.
    """
    return load_sourced_policy(source, sets).policy


def load_sourced_policy(source: str | Path = "default", sets: Sequence[str] = ()) -> SourcedPolicy:
    """Read a policy, and remember where its values come from. Raises: ConfigError."""
    name, text, is_ours = _read_source(source)
    parsed = parse_yaml(text, name, is_ours=is_ours)
    origins = Origins(name)
    for place, line in parsed.lines.items():
        origins.note(place, Origin(name, line), parsed.shown.get(place))
    values = _root(parsed, name)
    for item in sets:
        _set(item, values, origins)
    _check_version(values, origins)
    _open_empty_sections(values)
    try:
        return SourcedPolicy(Policy.model_validate(values), origins)
    except ValidationError as error:
        raise complain(error, values, origins) from None


def _read_source(source: str | Path) -> tuple[str, str, bool]:
    """The name to show, the text, and whether it is a preset.

    A word is a preset's name, and a file's only where no preset has it.
    """
    name = printable(str(source))
    preset = read_preset(source) if isinstance(source, str) else None
    if preset is not None:
        return f"preset {name}", preset, True
    text = read_text(Path(source), TEXT_BYTES_MAX, "a policy in YAML")
    if text is None:
        hint = f"presets: {', '.join(preset_names())}"
        raise ConfigError("there is no such file or preset", "a policy in YAML", file=name, hint=hint)
    return name, text, False


def _root(parsed: YamlText, file: str) -> dict[str, Any]:
    if parsed.value is None:
        raise ConfigError("the file is empty", f"a policy that begins with version: {VERSION}", file=file)
    if not isinstance(parsed.value, dict):
        raise ConfigError(f"found {show(parsed.value)}", "sections and knobs", file=file, line=parsed.lines.get(()))
    return parsed.value


def _check_version(values: dict[str, Any], origins: Origins) -> None:
    """Before all else: the other complaints would be about another format."""
    origin = origins.of(("version",))
    if "version" not in values:
        raise ConfigError("the key is missing", f"version: {VERSION}", file=origin.file, key="version")
    found = values["version"]
    if type(found) is not int or found != VERSION:
        raise ConfigError(f"found {show(found)}", str(VERSION), file=origin.file, line=origin.line, key="version")


def _set(item: str, values: dict[str, Any], origins: Origins) -> None:
    name, separator, text = item.partition("=")
    if not separator or not name.strip() or not can_be_given(item):
        raise ConfigError(f"found {show(item)}", "KNOB=VALUE, as checkpoint.every=2min", file=SET)
    place = tuple(name.strip().split("."))
    _check_knob(place)
    parsed = parse_setting(text, SET)
    here = values
    for part in place[:-1]:
        below_here = here.get(part)
        if not isinstance(below_here, dict):
            below_here = here[part] = {}
        here = below_here
    here[place[-1]] = parsed.value
    origins.note(place, Origin(SET), parsed.shown.get(()))


def _check_knob(place: tuple[str, ...]) -> None:
    if any(knob.path == place for knob in knobs()):
        return
    above = next((knob.name for knob in knobs() if knob.path == place[: len(knob.path)]), None)
    if above is not None:
        raise ConfigError("found a part of a knob", f"the whole of {above}", file=SET, key=dotted(place))
    if section_at(place) is None:
        raise unknown_key(place, Origins(SET))
    below = ", ".join(knob.name for knob in knobs() if knob.path[: len(place)] == place)
    raise ConfigError("found a section", f"one of its knobs: {below}", file=SET, key=dotted(place))


def _open_empty_sections(values: dict[str, Any], above: tuple[str, ...] = ()) -> None:
    """A section all of whose knobs are commented out is an empty one."""
    for name, value in values.items():
        place = (*above, name)
        if value is None and section_at(place) is not None:
            values[name] = {}
        elif isinstance(value, dict):
            _open_empty_sections(value, place)
