"""What is reported of the charges that the store keeps; part of `events`."""

from __future__ import annotations

from typing import Literal

from keepstep.core.failures import Charges
from keepstep.core.values import frozen


@frozen
class ChargesKept:
    """The store has these now."""

    operation: str
    charges: Charges
    kind: Literal["charges_kept"] = "charges_kept"
