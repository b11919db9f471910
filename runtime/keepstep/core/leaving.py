"""The end: workers are stopped, hosts leave together, the exit code is the job's."""

from __future__ import annotations

from keepstep.core.reasons import Reason
from keepstep.core.records import Standing
from keepstep.core.state import Turn
from keepstep.core.world import statuses_of

BARRIER_S = 10.0
"""How long a host waits for the others at the exit barrier."""

_LAST_OUT_S = 2.0


def leave_together(turn: Turn) -> None:
    """Once the job has ended and this host's worker is gone, wait for the others, then exit.

    The host that keeps etcd goes last: without it the others could not learn that the job has ended.
    """
    state, generation = turn.state, turn.generation
    if generation is None or not turn.is_over or state.workers:
        return
    if state.leaving_at is None:
        turn.set(leaving_at=turn.now)
    since = state.leaving_at if state.leaving_at is not None else turn.now
    statuses = statuses_of(turn, generation)
    others = [m for m in generation.members if m.host != state.job.host and m.host in state.cluster.nodes]
    own = statuses.get(state.job.host)
    told = not turn.is_member or (own is not None and own.standing is Standing.LEFT)
    together = all(m.host in statuses and statuses[m.host].standing is Standing.LEFT for m in others)
    if told and together and (not state.job.keeps_etcd or not others or turn.now >= since + _LAST_OUT_S):
        turn.leave(generation.exit_code or 0, generation.verdict, Reason.LEAVING)
    elif turn.now >= since + BARRIER_S or not turn.has_lease:
        turn.leave(generation.exit_code or 0, generation.verdict, Reason.LEAVING)
    else:
        turn.wake(since + (_LAST_OUT_S if told and together else BARRIER_S))
