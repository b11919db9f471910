"""What the job was charged with, kept in the store: where the platform starts it again, budgets do not begin anew."""

from __future__ import annotations

from keepstep.core.actions import KeepCharges
from keepstep.core.charge_events import ChargesKept
from keepstep.core.failures import Charges
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase
from keepstep.core.state import Turn
from keepstep.errors import ExitCode

KEEPING = "charges"

_STARTED_AGAIN = frozenset({ExitCode.HARDWARE, ExitCode.TOO_FEW_HOSTS, ExitCode.STORE_REFUSED, ExitCode.INTERRUPTED})
"""Ends after which the same job is started once more, on other machines mostly; any other is for people to look at."""


def on_charges_kept(turn: Turn, event: ChargesKept) -> None:
    """The store has them."""
    turn.landed(event.operation)
    turn.set_store(charges=event.charges)


def keep(turn: Turn) -> None:
    """Have the store know what the newest generation was charged with, by the leader.

    Once the job has ended for good there is nothing to count on from: whoever starts it again has all budgets.
    """
    generation, known = turn.generation, turn.state.store.charges
    if not turn.leads or not turn.state.job.has_store or generation is None or generation.phase is Phase.FORMING:
        return
    if known is None and not generation.restarts and not generation.ledger:
        return
    wanted = _left_by(generation)
    if wanted != known:
        turn.attempt(KeepCharges(KEEPING, wanted), Reason.CHARGES_KEPT, f"{wanted.restarts} restarts")


def _left_by(generation: GenerationRecord) -> Charges:
    if generation.phase is Phase.ENDED and generation.exit_code not in _STARTED_AGAIN:
        return Charges()
    return Charges(generation.restarts, generation.ledger)
