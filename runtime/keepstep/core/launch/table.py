"""The ranks of one generation: which host has which, and where its worker listens."""

from __future__ import annotations

from keepstep.core.values import frozen


@frozen
class RankTable:
    """One world of hosts, all in rank order.

    Attributes:
        generation: its number.
        hosts: their names.
        addresses: where each one's worker listens, host and port.
        full: how many hosts there are where none is missing.
        run: nonce of the run that it belongs to.
        feeders: where each host that runs tf.data's service has a port, the dispatcher's first.
    """

    generation: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    full: int
    run: str = ""
    feeders: tuple[str, ...] = ()
