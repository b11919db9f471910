"""Order and spelling of names."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(host: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key under which `algo-2` comes before `algo-10`."""
    words = _DIGITS.split(host)
    return tuple((1, int(word), "") if place % 2 else (0, 0, word) for place, word in enumerate(words))


def in_natural_order(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts sorted by `natural_key`."""
    return tuple(sorted(hosts, key=natural_key))
