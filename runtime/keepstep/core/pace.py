"""What snapshots and saves cost, as measured; so how often there are any, and which save is not begun any more."""

from __future__ import annotations

import math

from keepstep.core.actions import Measure, Report
from keepstep.core.failures import Failure
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase
from keepstep.core.state import NEVER, Turn

AUTO_MIN_S = 10.0
"""The shortest interval between checkpoints that keepstep chooses by itself."""

DRAG = 0.1
"""Share of its duration by which a save is reckoned to slow the training: it goes on beside it, at low priority."""

UNHURT_S = 86_400.0
"""Time between failures that is reckoned with where there was none, and at the most."""

STALL_RATIO_MAX = 0.005
"""Snapshots keep a training that is not hurt waiting for this share of its time at most: half of the 1 % that all of
keepstep may cost, since what each step is reported and measured with takes the rest.
"""

SNAPSHOT_EVERY_MAX = 1024

FIRST_SNAPSHOT_EVERY = 8
"""Steps between snapshots until their cost is measured, where the policy leaves it to keepstep."""

_NEAR = 1.7
"""An interval is left alone that is no more than so many times the best one, or so many times shorter: it loses a
seventh more at the most, and what a snapshot takes differs from one to the next."""

_DUTY_MAX, _SAVES_KEPT, _FAILURES_KEPT = 0.5, 5, 3
_CLEARLY = 0.8
"""Of the time between two checkpoints: what hardly fits in does not change with every step that is a little slower."""
_TOLD_RATIO = 0.2
"""By so much an interval differs from the one that was told last when it is told again."""


def failed(turn: Turn, generation: GenerationRecord, root: Failure | None) -> tuple[float, ...]:
    """When the training began or had the failure before the newest ones, and those; a world starts after `root`."""
    if not generation.failed_at:
        return (turn.now,)
    return generation.failed_at if root is None else (*generation.failed_at, root.at)[-1 - _FAILURES_KEPT :]


def between_s(turn: Turn, generation: GenerationRecord) -> float:
    """Mean seconds between two failures, of the newest ones: one often hurt of late is reckoned to be again."""
    if len(generation.failed_at) < 2:
        return UNHURT_S
    return min(UNHURT_S, max(1.0, (turn.now - generation.failed_at[0]) / (len(generation.failed_at) - 1)))


def _young(cost: float, between: float) -> float:
    """The interval that loses the least time, in the unit of both: sqrt(2 C M).

    C is what a save costs the training, M the mean time between failures. J. W. Young, "A first order approximation to
    the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2.0 * cost * between)


def first_every(turn: Turn) -> int:
    """The policy's steps between snapshots, or where to begin until their cost is measured."""
    return turn.state.policy.snapshot_every_steps or FIRST_SNAPSHOT_EVERY


def snapshot_every(turn: Turn, generation: GenerationRecord) -> int:
    """Steps between snapshots: the power of two that keeps the stall within its share, where the policy has no word.

    Less where failures cost more than that stall: what is done again after one is what was done since a snapshot.
    Powers of two: so a rank that has not yet heard of the change still shares every second snapshot with the others.
    """
    current, cost = generation.snapshot_every, turn.state.cluster.tally.costliest
    if turn.state.policy.snapshot_every_steps is not None:
        return current
    most = _most(turn, generation, cost)
    if current > most or cost <= 0.0:
        return min(current, most)
    wanted = next((2**n for n in range(10) if cost / 2**n <= STALL_RATIO_MAX), SNAPSHOT_EVERY_MAX)
    best = _best_every(turn, generation, cost)
    if best < wanted:
        wanted = current if current / _NEAR <= best <= current * _NEAR else 2 ** round(math.log2(best))
    elif wanted < current < wanted * 4:
        wanted = current
    return max(current, min(wanted, _most(turn, generation, cost, _CLEARLY))) if wanted > current else wanted


def _best_every(turn: Turn, generation: GenerationRecord, cost: float) -> float:
    """Steps between snapshots that lose the least time, 1 or more; the present ones where a step's time is unknown.

    Infinite where nothing has failed so far.
    """
    if len(generation.failed_at) < 2:
        return math.inf
    step_s = _step_s(turn)
    best = _young(cost, between_s(turn, generation) / step_s) if step_s else generation.snapshot_every
    return max(1.0, best)


def _most(turn: Turn, generation: GenerationRecord, cost: float, room: float = 1.0) -> int:
    """As many steps as the time between two checkpoints has, in powers of two, since each is made of a snapshot.

    That holds where the policy names the time, and for the first one of keepstep's own choice: nothing is measured
    then, and a few long steps are long to go without any.
    """
    every, step_s = turn.state.policy.checkpoint_every, _step_s(turn)
    limit_s = AUTO_MIN_S if every.seconds is None and every.steps is None and cost <= 0.0 else every.seconds
    if limit_s is None or not step_s or not turn.state.job.has_store or not _is_in_step(turn, generation):
        return SNAPSHOT_EVERY_MAX
    return min(SNAPSHOT_EVERY_MAX, 1 << max(0, int(math.log2(room * limit_s / step_s))))


def _is_in_step(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether more steps were done than the first, which is traced and tells nothing of the others."""
    start = 0 if generation.resume is None else generation.resume.step
    return all(worker.completed > start + 1 for worker in turn.state.workers)


def _step_s(turn: Turn) -> float:
    """Seconds of a step, of this host's worker or as others tell it; 0 where unknown."""
    own = max((worker.step_s for worker in turn.state.workers), default=0.0)
    told = (split.step_s for seen in turn.state.cluster.statuses.values() for split in seen.record.splits)
    return own or max(told, default=0.0)


def saved(turn: Turn, seconds: float) -> None:
    """A checkpoint took so long from the start of its slowest upload to its commit."""
    turn.set_store(saves=(*turn.state.store.saves, seconds)[-_SAVES_KEPT:])


def save_s(turn: Turn, generation: GenerationRecord) -> float:
    """Seconds that a save takes, the median of the last ones; what a former leader knew before; 0 where unknown."""
    saves = sorted(turn.state.store.saves)
    return saves[len(saves) // 2] if saves else generation.save_s


def interval_s(turn: Turn, generation: GenerationRecord) -> float | None:
    """Seconds between checkpoints: the policy's, or those that lose the least time; None where it counts steps."""
    every, took_s = turn.state.policy.checkpoint_every, save_s(turn, generation)
    if every.steps is not None or every.seconds is not None:
        return every.seconds
    return max(AUTO_MIN_S, took_s / _DUTY_MAX, _young(DRAG * took_s, between_s(turn, generation)))


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
    """Show the interval, once a save was measured."""
    took_s, interval = save_s(turn, generation), interval_s(turn, generation)
    if not took_s or interval is None:
        return
    turn.do(Report(Measure.CHECKPOINT_INTERVAL_S, interval))
    told_s, every = turn.state.store.told_interval_s, turn.state.policy.checkpoint_every
    if turn.leads and every.seconds is None and abs(interval - told_s) > _TOLD_RATIO * told_s:
        turn.set_store(told_interval_s=interval)
        turn.because(Reason.CADENCE_CHANGED, f"a checkpoint every {interval:.0f} s, each takes {took_s:.1f} s")


def tell_committable(turn: Turn) -> None:
    """Show whether an interruption would leave the time for a save, by the last ones and what this one has taken."""
    generation, store = turn.generation, turn.state.store
    if generation is None or generation.phase is Phase.ENDED:
        return
    took_s, room_s = save_s(turn, generation), turn.state.policy.interruption.grace - _step_s(turn)
    late_at = NEVER if store.saving_since is None else store.saving_since + room_s
    fits = took_s <= room_s and turn.now < late_at
    if fits:
        turn.wake(late_at)
    if (took_s or not fits) and fits != store.told_committable:
        turn.set_store(told_committable=fits)
        turn.do(Report(Measure.COMMITTABLE, float(fits)))
