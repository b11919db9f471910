"""YAML to plain values, each with its line: a small part of YAML, and no way to make it large.

Words are true, false and null as YAML 1.2 has them: `on` and `off` are words like others. Aliases, tags and merge keys
are refused, and what is nested too deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field

import yaml

from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.files import can_be_given, printable
from keepstep.intake.policy.origins import Place, dotted

TEXT_BYTES_MAX = 256 * 1024
DEPTH_MAX = 12
_WANTED = "a policy in YAML"
_INT = re.compile(r"[-+]?\d{1,18}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\d{1,18}\.\d*|\.\d+|\d{1,18}(?:\.\d*)?[eE][-+]?\d{1,3})", re.ASCII)
_WORDS: dict[str, object] = {"": None, "~": None, "null": None, "true": True, "false": False}


@frozen
class YamlText:
    """Values of a YAML text, and where they stand.

    Attributes:
        value: mappings, lists and scalars; None for an empty text.
        lines: line of each value, counted from 1, by its place.
        shown: each plain scalar as it was written, by its place.
    """

    value: object
    lines: dict[Place, int | None] = field(default_factory=dict)
    shown: dict[Place, str] = field(default_factory=dict)


def parse_yaml(text: str, file: str, *, is_ours: bool = False) -> YamlText:
    """Parse one document.

    Args:
        is_ours: it ships with keepstep, and is read by libyaml, where that is there: ten times as fast, and it reads
            the same in what is well-formed; of what is not, it says other things.

    Raises:
        ConfigError: it is malformed, repeats a key, or uses what is refused.
    """
    return _Reader(file).read(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if is_ours else yaml.SafeLoader)


def parse_setting(text: str, file: str) -> YamlText:
    """Parse what stands behind `KNOB=`: a list, a mapping or a quoted text as YAML, and a word as it is.

    Raises:
        ConfigError: a list or mapping is malformed.
    """
    if text.lstrip()[:1] in ("[", "{", '"', "'"):
        return parse_yaml(text, file)
    return YamlText(_resolve(text.strip()), {}, {(): text.strip()})


class _Reader:
    """One text's events, read as they come: what is refused is refused before the rest is looked at."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._events: Iterator[yaml.Event] = iter(())
        self._lines: dict[Place, int | None] = {}
        self._shown: dict[Place, str] = {}

    def read(self, text: str, loader: type[yaml.SafeLoader | yaml.CSafeLoader]) -> YamlText:
        value: object = None
        try:
            self._events = iter(yaml.parse(text, Loader=loader))
            documents = 0
            for event in self._events:
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        raise self._error(event, "found a second document", "one document")
                    value = self._value(next(self._events), ())
        except yaml.reader.ReaderError as error:
            found = f"found the character U+{_code(error.character):04X}"
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(found, f"{_WANTED}, plain text", file=self._file, line=line) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = None if mark is None else min(mark.line, text.count("\n")) + 1
            raise ConfigError(
                f"malformed YAML: {printable(_reason(error, text))}", _WANTED, file=self._file, line=at
            ) from None
        return YamlText(value, self._lines, self._shown)

    def _value(self, event: yaml.Event, place: Place) -> object:
        self._lines.setdefault(place, _line(event))
        if len(place) > DEPTH_MAX:
            raise self._error(event, f"found more than {DEPTH_MAX} levels", "fewer levels")
        self._refuse_decoration(event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(place)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(place)
        if not isinstance(event, yaml.ScalarEvent):
            raise self._error(event, "found no value", "a value")
        text = self._plain(event)
        if event.style:  # libyaml says "" of what is plain
            return text
        self._shown[place] = text
        return _resolve(text)

    def _mapping(self, place: Place) -> dict[str, object]:
        values: dict[str, object] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._refuse_decoration(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(event, "found a key that is no word", "a knob's name")
            key = self._plain(event)
            here: Place = (*place, key)
            if key in values:
                raise self._error(event, "the key stands there twice", "each key once", dotted(here))
            self._lines[here] = _line(event)
            values[key] = self._value(next(self._events), here)
        return values

    def _sequence(self, place: Place) -> list[object]:
        values: list[object] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, (*place, len(values))))
        return values

    def _plain(self, event: yaml.ScalarEvent) -> str:
        text = str(event.value)
        if not can_be_given(text):
            raise self._error(event, "found a NUL or half a surrogate pair", "text that a process can be given")
        return text

    def _refuse_decoration(self, event: yaml.Event) -> None:
        """No anchors, aliases and tags: the first two can grow without limit, the last can name code."""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._error(event, "found an anchor or an alias", "each value written out")
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise self._error(event, f"found the tag {printable(str(tag))}", "a value without a tag")

    def _error(self, event: yaml.Event, found: str, wanted: str, key: str = "") -> ConfigError:
        return ConfigError(found, wanted, file=self._file, line=_line(event), key=key)


def _line(event: yaml.Event) -> int | None:
    return None if event.start_mark is None else event.start_mark.line + 1


def _code(character: object) -> int:
    """PyYAML names a character by its number, or by itself."""
    return ord(character) if isinstance(character, str) else int(str(character))


def _resolve(text: str) -> object:
    """The value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _reason(error: yaml.MarkedYAMLError, text: str) -> str:
    mark, lines = error.problem_mark, text.splitlines()
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "a tab stands where spaces are wanted"
    return " ".join(part for part in (error.context, error.problem) if part)
