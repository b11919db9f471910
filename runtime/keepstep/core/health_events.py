"""What sensors report of a host's health."""

from __future__ import annotations

from typing import Literal

from keepstep.core.values import frozen

StrainSource = Literal["host", "gpu"]


@frozen
class StrainsChanged:
    """What slows this host down has changed: short texts with their figures, as `cpu taken by other guests 31 %`.

    They are evidence, no verdict: they tell why a host is slow, where it is.
    """

    source: StrainSource
    strains: tuple[str, ...]
    kind: Literal["strains_changed"] = "strains_changed"
