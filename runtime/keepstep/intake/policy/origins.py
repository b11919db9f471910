"""Where each value of a policy was written."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.core.values import frozen
from keepstep.intake.files import printable

Place = tuple[str | int, ...]
"""A path from the root: names of keys, numbers of list entries."""


def dotted(place: Place) -> str:
    """A place as people write it: `failures[2].cause`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return printable(text.removeprefix("."))


@frozen
class Origin:
    """A file and a line of it, or a word for another source."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True)
class Origins:
    """Origins by place; a place that was not written itself has that of what it stands in."""

    file: str
    _by_place: dict[Place, Origin] = field(default_factory=dict)
    _shown: dict[Place, str] = field(default_factory=dict)
    _inner: set[Place] = field(default_factory=set)

    def note(self, place: Place, origin: Origin, shown: str | None = None) -> None:
        """Remember where a value comes from, and how a scalar was written; what was below it is forgotten."""
        if place in self._inner or place in self._by_place:
            for other in [other for other in self._by_place if other[: len(place)] == place]:
                del self._by_place[other]
                self._shown.pop(other, None)
        self._by_place[place] = origin
        self._inner.update(place[:length] for length in range(len(place)))
        if shown is not None:
            self._shown[place] = shown

    def of(self, place: Place) -> Origin:
        """Where a value, or what it stands in, was written."""
        for length in range(len(place), -1, -1):
            if place[:length] in self._by_place:
                return self._by_place[place[:length]]
        return Origin(self.file)

    def written(self, place: Place) -> Origin | None:
        """Where the value itself was written; None for a default."""
        return self._by_place.get(place)

    def shown(self, place: Place) -> str:
        """A scalar as it was written; empty where there is none."""
        return self._shown.get(place, "")
