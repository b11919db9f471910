"""Hosts on the stage as their preflight finds them: all well, but for what is said here."""

from __future__ import annotations

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.preflight_records import Check, Complaint, Guest, Link, Rate
from tests.scenarios.watched import Watched

_USUAL = {Check.SPEED: 1e9, Check.MEMORY: 8e9, Check.LINK: 1e9}


class Checked(Watched):
    """A stage whose hosts are looked at before they train."""

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[tuple[str, Check], float] = {}
        self._complaints: dict[str, tuple[Complaint, ...]] = {}

    def measures(self, host: str, check: str, value: str) -> None:
        """From now on a host does so much, or its line carries so much; 0 is a line that carries nothing."""
        self._rates[host, Check(check)] = float(value)

    def complains(self, host: str, check: str, text: str) -> None:
        """From now on a host finds fault with itself."""
        self._complaints[host] = (Complaint(Check(check), text),)

    def look(self, action: a.SamplePulse | a.CollectStacks | a.CheckHost) -> e.Event:
        """What is seen of the worker, or of the host."""
        if isinstance(action, a.CheckHost):
            return e.HostChecked(action.operation, "ml.test", *self.found("algo-1", action.peers), seconds=2.0)
        return super().look(action)

    def found(
        self, host: str, peers: tuple[Guest, ...]
    ) -> tuple[tuple[Rate, ...], tuple[Complaint, ...], tuple[Link, ...]]:
        """What a host's own look comes to."""
        rates = tuple(Rate(check, self._rate(host, check)) for check in (Check.SPEED, Check.MEMORY))
        links = tuple(self._link(peer.host, min(self._rate(each, Check.LINK) for each in (host, peer.host)))
                      for peer in peers)  # fmt: skip
        return rates, self._complaints.get(host, ()), links

    def _rate(self, host: str, check: Check) -> float:
        return self._rates.get((host, check), _USUAL[check])

    @staticmethod
    def _link(peer: str, rate: float) -> Link:
        return Link(peer, rate, rate) if rate else Link(peer, error="no route to host")
