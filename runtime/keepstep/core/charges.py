"""What the job was charged with, kept in the store: where the platform starts it again, budgets do not begin anew."""

from __future__ import annotations

from keepstep.core.actions import KeepCharges
from keepstep.core.charge_events import ChargesKept
from keepstep.core.failures import Charges
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase
from keepstep.core.restarts import exit_code_of
from keepstep.core.state import Turn
from keepstep.errors import ExitCode

KEEPING = "charges"

_STARTED_AGAIN = frozenset({ExitCode.HARDWARE, ExitCode.TOO_FEW_HOSTS, ExitCode.STORE_REFUSED, ExitCode.INTERRUPTED})
"""Ends after which the same job may be started once more, on other machines mostly."""


def on_charges_kept(turn: Turn, event: ChargesKept) -> None:
    """The store has them."""
    turn.landed(event.operation)
    turn.set_store(charges=event.charges)


def keep(turn: Turn) -> None:
    """Have the store know what the newest generation was charged with, by the leader.

    Once the job has ended for good there is nothing to count on from: whoever starts it again has all budgets. A
    generation that never was ready may have been made before the store had said what there was, and adds nothing to it.
    """
    generation, known = turn.generation, turn.state.store.charges
    if not turn.leads or not turn.state.job.has_store or generation is None or generation.phase is Phase.FORMING:
        return
    if not generation.settled or (known is None and not generation.restarts and not generation.ledger):
        return
    wanted = Charges() if _is_over(generation) else Charges(generation.restarts, generation.ledger)
    if wanted != known:
        turn.attempt(KeepCharges(KEEPING, wanted), Reason.CHARGES_KEPT, f"{wanted.restarts} restarts")


def _is_over(generation: GenerationRecord) -> bool:
    """Whether the job has ended by itself, or by its worker's own failure: the platform starts no such job again."""
    if generation.phase is not Phase.ENDED:
        return False
    root, code = generation.root, generation.exit_code
    own = root is not None and (root.exit_code or root.signal is not None) and exit_code_of(root) == code
    return bool(own) or code not in _STARTED_AGAIN
