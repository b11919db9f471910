"""What is known of this host's health, and what follows from it."""

from __future__ import annotations

from keepstep.core.health_events import StrainsChanged
from keepstep.core.reasons import Reason
from keepstep.core.state import State, Turn


def on_strains_changed(turn: Turn, event: StrainsChanged) -> None:
    """Something slows this host down, or does not any more."""
    turn.set(strains={**turn.state.strains, event.source: event.strains})
    turn.because(Reason.STRAINED if event.strains else Reason.STRAIN_OVER, "; ".join(event.strains) or event.source)


def strains_of(state: State) -> tuple[str, ...]:
    """All that slows this host down, in words."""
    return tuple(strain for source in sorted(state.strains) for strain in state.strains[source])
