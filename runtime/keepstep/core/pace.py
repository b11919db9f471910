"""How long a save takes, as measured; so how often to save, and which save is not begun any more."""

from __future__ import annotations

import math

from keepstep.core.actions import Measure, Report
from keepstep.core.records import GenerationRecord
from keepstep.core.state import Turn

AUTO_MIN_S = 10.0
"""The shortest interval between checkpoints that keepstep chooses by itself."""

DRAG = 0.1
"""Share of its duration by which a save is reckoned to slow the training: it goes on beside it, at low priority."""

UNHURT_S = 86_400.0
"""Time between failures that is reckoned with where the policy's window has seen none."""

_DUTY_MAX = 0.5
_SAVES_KEPT = 5


def saved(turn: Turn, seconds: float) -> None:
    """A checkpoint took so long from the start of its slowest upload to its commit."""
    turn.set_store(saves=(*turn.state.store.saves, seconds)[-_SAVES_KEPT:])


def save_s(turn: Turn, generation: GenerationRecord) -> float:
    """Seconds that a save takes, the median of the last ones; what a former leader knew before; 0 where unknown."""
    saves = sorted(turn.state.store.saves)
    return saves[len(saves) // 2] if saves else generation.save_s


def auto_interval_s(turn: Turn, generation: GenerationRecord) -> float:
    """Seconds between checkpoints that lose the least time: sqrt(2 C M), after Young.

    C is what a save costs the training, M the mean time between failures. J. W. Young, "A first order approximation to
    the optimum checkpoint interval", CACM 17(9), 1974.
    """
    window_s = turn.state.policy.restart.budget.window_s
    failures = sum(1 for entry in generation.ledger if entry.at > turn.now - window_s)
    between_s = window_s / failures if failures else UNHURT_S
    took_s = save_s(turn, generation)
    return max(AUTO_MIN_S, took_s / _DUTY_MAX, math.sqrt(2.0 * DRAG * took_s * between_s))


def interval_s(turn: Turn, generation: GenerationRecord) -> float | None:
    """Seconds between checkpoints; None where the policy counts steps."""
    every = turn.state.policy.checkpoint_every
    if every.steps is not None:
        return None
    return auto_interval_s(turn, generation) if every.seconds is None else every.seconds


def too_late(turn: Turn, generation: GenerationRecord) -> str:
    """Why no save that is begun now is committed before a host is taken away; empty where one may be.

    By the shortest of the last saves: to try in vain costs nothing that is saved, not to try costs the steps.
    """
    if not turn.state.cluster.requests:
        return ""
    left_s = min(seen.record.deadline for seen in turn.state.cluster.requests.values()) - turn.now
    needed_s = min(turn.state.store.saves, default=generation.save_s)
    return f"a save takes {needed_s:.1f} s and {max(left_s, 0.0):.1f} s are left" if needed_s > left_s else ""


def report(turn: Turn, generation: GenerationRecord) -> None:
    """Show the interval, and whether an interruption would leave the time for a save; once a save was measured."""
    took_s, interval = save_s(turn, generation), interval_s(turn, generation)
    if not took_s:
        return
    if interval is not None:
        turn.do(Report(Measure.CHECKPOINT_INTERVAL_S, interval))
    step_s = max((worker.step_s for worker in turn.state.workers), default=0.0)
    turn.do(Report(Measure.COMMITTABLE, float(took_s + step_s <= turn.state.policy.interruption.grace)))
