"""A planned pause: all workers stop at one agreed step, which is saved, and a new generation goes on from there.

It is how a world grows, loses a cordoned host, or is restarted by an operator, without executing a step twice.
"""

from __future__ import annotations

from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase, StatusRecord
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import durable_step, statuses_of

PAUSE_S = 30.0
"""How long a pause may take; then the new generation goes on from the newest snapshot there is."""


def plan(turn: Turn, generation: GenerationRecord) -> bool:
    """Ask for a pause where a member is cordoned or an operator wants a restart; True where it was asked for."""
    cluster = turn.state.cluster
    if any(generation.rank_of(host) >= 0 for host in cluster.cordons):
        return ask(turn, generation, Reason.HOST_CORDONED)
    if any(order not in generation.served for order in cluster.orders):
        return ask(turn, generation, Reason.RESTART_ORDERED)
    return False


def ask(turn: Turn, generation: GenerationRecord, why: Reason, detail: str = "") -> bool:
    """Put the pause into the generation's record; what was ordered by then is carried out with it."""
    served = tuple(sorted({*generation.served, *turn.state.cluster.orders}))
    return turn.put(evolve(generation, pause=why.value, served=served), why, detail)


def proceed(turn: Turn, generation: GenerationRecord) -> None:
    """Once every member has said which step its worker has entered, agree on the last of them."""
    target = _target(generation, statuses_of(turn, generation))
    if not generation.drain_step and target > _safe_step(turn, generation):
        saves = turn.state.job.has_store and turn.state.store.available and not turn.state.store.refused
        record = evolve(generation, drain_step=target, save_step=target if saves else 0)
        turn.put(record, Reason.DRAIN_AGREED, f"step {target}")


def is_over(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether the new generation can begin: the agreed step is safe, or has been waited for long enough."""
    if not generation.pause or generation.phase is not Phase.READY:
        return False
    paused_at = turn.state.paused_at
    if paused_at is None or turn.now >= paused_at + PAUSE_S:
        return True
    turn.wake(paused_at + PAUSE_S)
    statuses = statuses_of(turn, generation)
    target = _target(generation, statuses)
    if target < 0:
        return False
    if not generation.drain_step:
        return target <= _safe_step(turn, generation)
    if generation.save_step or durable_step(turn, generation) >= generation.drain_step:
        return durable_step(turn, generation) >= generation.drain_step
    return all(status.sealed >= generation.drain_step for status in statuses.values())


def _target(generation: GenerationRecord, statuses: dict[str, StatusRecord]) -> int:
    """The newest step that any member has entered; -1 while one has not said so."""
    if len(statuses) < len(generation.members) or any(status.entered < 0 for status in statuses.values()):
        return -1
    return max((status.entered for status in statuses.values()), default=0)


def _safe_step(turn: Turn, generation: GenerationRecord) -> int:
    """The step that the next generation can have without a pause."""
    started = generation.resume.step if generation.resume is not None else 0
    return max(durable_step(turn, generation), started)
