"""A slow rank is looked at beside a healthy one: `straggler.respond: profile`.

The leader names both in the generation's record (`ask`); each of the two nodes sees its name there and looks at its own
worker, once (`take`). Nobody waits for what comes of it: training goes on, and what fails is told and forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.core.actions import ProfileWorker
from keepstep.core.profiles import Profile, Straggler, WorkerProfiled
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase, Standing
from keepstep.core.splits import Split
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import statuses_of

AGAIN_S = 150.0
"""Not sooner is another profile asked for: by then the hands are done with the one before, or have given it up."""
_PROFILES_MAX = 8
"""In one generation: where more ranks are slow than this, more profiles tell nothing new."""


def ask(turn: Turn, generation: GenerationRecord, found: Sequence[Straggler]) -> bool:
    """Have the most expensive straggler that was not looked at yet looked at; True where that was asked for."""
    former = generation.profile
    asked = () if former is None else former.asked
    if len(asked) >= _PROFILES_MAX:
        return False
    for each in found:
        name = f"{each.rank}:{each.part.value}"
        if name in asked:
            continue
        if former is not None and turn.now < former.at + AGAIN_S:
            turn.wake(former.at + AGAIN_S)
            return False
        splits, slow = _splits(turn, generation), {other.host for other in found}
        peer = healthy_peer({host: split for host, split in splits.items() if host not in slow})
        if each.host not in splits or not peer:
            continue
        profile = Profile(len(asked) + 1, turn.now, each, peer, splits[each.host], splits[peer], (*asked, name))
        detail = f"{each.host} rank {each.rank} for its {each.part.value}, beside {peer}"
        return turn.put(evolve(generation, profile=profile), Reason.PROFILE_WANTED, detail)
    return False


def _splits(turn: Turn, generation: GenerationRecord) -> dict[str, Split]:
    """By host, the newest windows of all who train; of several ranks of a host the slowest one's."""
    statuses = statuses_of(turn, generation)
    told = {host: status.splits for host, status in statuses.items() if status.standing is Standing.RUNNING}
    return {host: max(splits, key=lambda split: split.work_s) for host, splits in told.items() if splits}


def healthy_peer(splits: Mapping[str, Split]) -> str:
    """The host whose own work is nearest to the median of these; empty where there are none."""
    if not splits:
        return ""
    usual_s = median(split.work_s for split in splits.values())
    return min(splits, key=lambda host: abs(splits[host].work_s - usual_s))


def take(turn: Turn) -> None:
    """Look at this host's worker where the leader has named it, once, and only while it trains on."""
    state, generation = turn.state, turn.generation
    if generation is None or generation.profile is None or generation.phase is not Phase.READY:
        return
    profile, mark = generation.profile, (generation.number, generation.profile.number)
    if state.job.host not in profile.hosts or state.profiled >= mark or not turn.is_member:
        return
    if generation.pause or generation.drain_step or turn.interrupted or state.held_at is not None:
        return
    for worker in state.workers:
        if worker.generation == generation.number and worker.stepped and not worker.stopping:
            turn.set(profiled=mark)
            operation = f"profile:{generation.number}:{profile.number}"
            own = profile.split_of(state.job.host).rank
            rank = own if own >= 0 else worker.rank
            action = ProfileWorker(operation, worker.worker_id, generation.number, state.job.host, rank, profile)
            turn.attempt(action, Reason.PROFILE_STARTS, f"rank {rank}")


def on_worker_profiled(turn: Turn, event: WorkerProfiled) -> None:
    """What came of it; there is nothing to be done about what failed."""
    turn.landed(event.operation)
    trouble = "; ".join(event.trouble)
    if event.folder:
        turn.because(Reason.PROFILE_KEPT, f"{event.folder}{': ' + trouble if trouble else ''}")
    else:
        turn.because(Reason.PROFILE_FAILED, trouble)
