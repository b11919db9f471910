"""Who is slow, of what, and what that costs: the leader compares what each rank's own part of a step takes.

In a synchronous step everybody is as slow as the slowest. So each node adds up its own steps in windows (`add`), and
tells the newest window in its status; the leader looks at each new one once (`judge`), beside the newest ones of the
others. A rank is slow in a window whose own work takes longer than the median of its peers' by the policy's ratio,
beyond what scatters among them (three times the median absolute deviation), and enough to matter to the step; it is
a straggler once it was slow in so many windows more than it was well in: before, it was slow for once. They need not be
in a row: on machines that others share, a slow rank is now and then no slower than its peers. What counts is within
a generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from keepstep.core import elastic, pausing, profiling
from keepstep.core.actions import Measure, Report
from keepstep.core.facts import Track
from keepstep.core.profiles import Straggler
from keepstep.core.reasons import Reason
from keepstep.core.records import EQUAL_WEIGHT, CordonRecord, GenerationRecord, Phase, StatusRecord
from keepstep.core.slowness import COST_RATIO_MIN, Crowd, excess
from keepstep.core.splits import Part, Split, added, begin, is_full
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import statuses_of

_WINDOW_S = 0.4
"""A little less than between two samples (half a second), of which one may come early: else many a window had two."""
_WINDOW_S_PER_MEMBER = 0.008
"""No window is shorter: each is a write of every member, and etcd takes some thousand in a second."""
_LOOK_S = 0.05
"""No two looks at all of them are closer than this, nor than a window's time for each member."""
_STALE_WINDOWS = 3
PAUSE_COST_S = 10.0
"""What all lose by a pause and a new start, about. Nothing is done about a straggler before it has cost as much: what
passes by itself costs no pause then, and what does not never costs more than twice of what was to be had.
"""
_REBALANCE_AGAIN_S = 60.0
_IN_VAIN_S = 3600.0
"""A rebalance is a pause of all: the next one has to wait, and much longer where the last one gained less than half of
what it was to: not all of what a rank does grows with its part of the batch.
"""


def window_s(members: int) -> float:
    """The shortest window in a world of so many."""
    return max(_WINDOW_S, _WINDOW_S_PER_MEMBER * members)


def add(turn: Turn, worker_id: str, more: Sequence[Split]) -> None:
    """Steps of this host's ranks were measured: a window that is full is told."""
    generation, knobs = turn.generation, turn.state.policy.straggler
    if generation is None or not more or knobs.respond == "off":
        return
    for worker in turn.state.workers:
        if worker.worker_id != worker_id:
            continue
        windows = {window.total.rank: window for window in worker.windows}
        told = {split.rank: split for split in worker.splits}
        for split in more:
            window = added(windows.get(split.rank) or begin(split.step, turn.now), split)
            if is_full(window, knobs.window, window_s(len(generation.members)), turn.now):
                told[split.rank], window = window.total, begin(split.step, turn.now, split.rank)
            windows[split.rank] = window
        turn.set_worker(worker_id, windows=tuple(windows.values()), splits=tuple(told.values()))


def judge(turn: Turn) -> None:
    """The leader's look at all windows that are new, once in a while."""
    state, generation = turn.state, turn.generation
    if not turn.leads or generation is None or generation.phase is not Phase.READY:
        return
    if state.tracked != generation.number:
        turn.set(tracked=generation.number, tracks={}, judged_at=turn.now)
    if state.policy.straggler.respond == "off":
        return
    if turn.now < state.judged_at + max(_LOOK_S, _WINDOW_S_PER_MEMBER * len(generation.members)):
        return  # the next status comes soon enough
    told = {_name(status.host, split): (split, status)
            for status in statuses_of(turn, generation).values() for split in status.splits}  # fmt: skip
    tracks = dict(state.tracks)
    news = [name for name, (split, _) in told.items() if split.step > tracks.get(name, Track()).step]
    if not news:
        return  # to have looked now would put off the look at what comes right away
    splits = {name: split for name, (split, _) in told.items()}
    crowd = Crowd(splits, _stale(turn, splits.values()))
    for name in news:
        tracks[name] = _followed(turn, tracks.get(name, Track()), *told[name], crowd)
    turn.set(judged_at=turn.now, tracks=tracks)


def _stale(turn: Turn, splits: Iterable[Split]) -> int:
    """Steps after which a window is of another time: where steps are short, a window has more than the policy's."""
    assert turn.generation is not None
    step_s = max(1e-4, min(split.step_s for split in splits))
    in_a_window = max(turn.state.policy.straggler.window, window_s(len(turn.generation.members)) / step_s)
    return round(_STALE_WINDOWS * in_a_window)


def _name(host: str, split: Split) -> str:
    """What a rank is called among all."""
    return host if split.rank < 0 else f"{host}/{split.rank}"


def _rank(turn: Turn, host: str, split: Split) -> int:
    """A rank's number: mpirun's, or else its host's place in the generation."""
    assert turn.generation is not None
    return split.rank if split.rank >= 0 else turn.generation.rank_of(host)


def _followed(turn: Turn, track: Track, own: Split, status: StatusRecord, crowd: Crowd) -> Track:
    """One rank's record with its newest window, `own`, in it."""
    knobs, name = turn.state.policy.straggler, _name(status.host, own)
    if crowd.is_alone(name):
        return track
    best_s = min(own.work_s, track.best_s or own.work_s)
    track = evolve(track, step=own.step, best_s=best_s, at=track.at if track.slow else turn.now)
    # who is a straggler is one until it is well by half
    bound = knobs.slower_than if track.found is None else 1.0 + (knobs.slower_than - 1.0) / 2
    if crowd.is_slow(name, bound):
        peers = crowd.peers(name)
        waited = (own.work_s - median(peer.work_s for peer in peers)) / own.step_s
        track = evolve(track, lost_s=round(track.lost_s + waited * (turn.now - (track.at or turn.now)), 3), at=turn.now)
        costs = {part: track.costs.get(part, 0.0) + excess(own, peers, part) for part in Part}
        track = evolve(track, slow=track.slow + 1, well=0, costs=costs, since=track.since or own.step)
        return _found(turn, track, own, status, peers) if track.slow >= knobs.windows else track
    if track.found is None:
        return _eased(turn, track, _rank(turn, status.host, own), status.host)
    if track.well + 1 < knobs.windows:
        return evolve(track, well=track.well + 1)
    text = f"{track.found.host}: all have waited {track.lost_s:.1f} s for it"
    turn.do(Report(Measure.STRAGGLER, 0.0, _label(track.found)), Reason.STRAGGLER_OVER, text)
    return evolve(track, slow=0, well=0, costs={}, since=0, lost_s=0.0, found=None)


def _eased(turn: Turn, track: Track, rank: int, host: str) -> Track:
    """The track of who is none: a window in which it is well takes back one in which it was slow."""
    left = track.slow - 1
    if left > 0:
        costs = {part: cost * left / track.slow for part, cost in track.costs.items()}
        return evolve(track, slow=left, costs=costs, at=turn.now)
    if track.slow:
        turn.do(Report(Measure.SLOW_ONCE, 1.0, str(rank)), Reason.SLOW_FOR_ONCE, f"{host} rank {rank}")
    return evolve(track, slow=0, well=0, costs={}, since=0, lost_s=0.0)


def _found(turn: Turn, track: Track, own: Split, status: StatusRecord, peers: list[Split]) -> Track:
    """The track of a straggler, told when it is found, when another part is the slow one, and when it is known why.

    What strains its host is often known some seconds later than that it is slow.
    """
    part = max(Part, key=lambda each: track.costs.get(each, 0.0))
    usual_s, former = median(peer.work_s for peer in peers), track.found
    # without it a step would be as long as the slowest of the others makes it
    cost_s = max(0.0, own.work_s - max(peer.work_s for peer in peers))
    found = Straggler(
        status.host,
        _rank(turn, status.host, own),
        part,
        round(own.work_s / usual_s, 2) if usual_s > 0 else 0.0,
        round(track.costs.get(part, 0.0) / track.slow, 6),
        round(own.step_s, 6),
        round(cost_s / own.step_s, 3),
        track.since,
        round(own.work_s / track.best_s, 2) if track.best_s > 0 else 0.0,
        status.strains or (() if former is None else former.strains),
        track.lost_s,
    )
    if former is not None and former.part is not found.part:
        turn.do(Report(Measure.STRAGGLER, 0.0, _label(former)))
    if former is None or former.part is not found.part or (found.strains and not former.strains):
        turn.because(Reason.STRAGGLER_FOUND, describe(found))
    turn.do(Report(Measure.STRAGGLER, found.cost_ratio, _label(found)))
    told_s = 0.0 if former is None else former.lost_s
    turn.do(Report(Measure.STRAGGLER_WAIT_S, track.lost_s - told_s, str(found.rank)))
    return evolve(track, found=found)


def _label(found: Straggler) -> str:
    return f"{found.rank}:{found.part.value}"


def describe(found: Straggler) -> str:
    """One line for people: who, of what, how much, what it costs, since when, and what else is known."""
    own = f"; {found.past_ratio:.1f} times its own best" if found.past_ratio >= 1.2 else "; it always was"
    known = "".join(f"; {strain}" for strain in found.strains)
    return (
        f"{found.host} rank {found.rank} works {found.work_ratio:.2f} times as long as its peers: "
        f"{found.part.value} takes {found.excess_s * 1e3:.1f} ms more in a step of {found.step_s * 1e3:.1f} ms, "
        f"which costs the job {found.cost_ratio:.0%}, {found.lost_s:.1f} s by now, since step {found.since}{own}{known}"
    )


def respond(turn: Turn, generation: GenerationRecord) -> bool:
    """What the leader does about who is slow, where nothing else is under way; True where something was done."""
    how = turn.state.policy.straggler.respond
    if turn.state.tracked != generation.number or turn.state.judged_at != turn.now:
        return False  # what has changed since the last look comes with the next one
    found = stragglers(turn)
    if how == "profile":
        return profiling.ask(turn, generation, found)
    found = [each for each in found if each.lost_s >= PAUSE_COST_S]
    if how == "replace":
        return _replace(turn, found)
    of_its_batch = any(each.part is not Part.REST for each in found)
    if how == "rebalance" and turn.state.job.strategy == "multi_worker" and of_its_batch:
        return _rebalance(turn, generation)
    return False


def _replace(turn: Turn, found: list[Straggler]) -> bool:
    """Cordon as many of them as may be: each pause is one of all, so they go together.

    What a rank does between its steps is the script's, as the first one's checkpoints and logs: it would go with the
    rank to another host. So that is no reason, unless something is known that slows the host itself down.
    """
    worst: dict[str, Straggler] = {}
    for each in found:
        if each.part is not Part.REST or each.strains:
            worst.setdefault(each.host, each)
    done = False
    for each in worst.values():
        if elastic.may_do_without(turn, each.host):
            cordon = CordonRecord(each.host, "straggler", turn.now, describe(each))
            done = turn.put(cordon, Reason.STRAGGLER_REPLACED, each.host) or done
    return done


def _rebalance(turn: Turn, generation: GenerationRecord) -> bool:
    """Give each member a part of the batch that it works on as long as the others do on theirs."""
    statuses = statuses_of(turn, generation)
    splits = {host: status.splits[0] for host, status in statuses.items() if status.splits and status.divides}
    if len(splits) < len(generation.members) or turn.now < generation.weighed_at + _REBALANCE_AGAIN_S:
        return False
    worst_s, known = max(map(_bound_s, splits.values())), dict(generation.weights)
    hoped_s = generation.weighed_from_s - generation.weighed_to_s
    in_vain = generation.weighed_from_s - worst_s < hoped_s / 2
    if in_vain and generation.weights and turn.now < generation.weighed_at + _IN_VAIN_S:
        return False
    weights, even_s = balanced({host: known.get(host, EQUAL_WEIGHT) for host in splits}, splits)
    if not weights:
        return False
    text = ", ".join(f"{host} {weight / EQUAL_WEIGHT:.2f}" for host, weight in weights.items())
    record = evolve(
        generation,
        weights=tuple(weights.items()),
        weighed_at=turn.now,
        weighed_from_s=round(worst_s, 6),
        weighed_to_s=round(even_s, 6),
    )
    return pausing.ask(turn, record, Reason.WORLD_REBALANCED, text)


def _bound_s(split: Split) -> float:
    """What of a rank's step is taken to grow with its part of the batch, seconds."""
    return max(split.data_s + split.compute_s, 1e-6)


def balanced(weights: Mapping[str, int], splits: Mapping[str, Split]) -> tuple[dict[str, int], float]:
    """By host, the weights with which all would work equally long, and how long; none where it would gain too little.

    What a rank takes for its data and its computing is taken to grow with its part of the batch. No weight falls below
    a quarter of an equal one: a rank that is so slow is to be replaced, and an empty part suits no script.
    """
    speeds = {host: weights[host] / _bound_s(splits[host]) for host in splits}
    even_s = sum(weights.values()) / sum(speeds.values())
    gain_s = max(map(_bound_s, splits.values())) - even_s
    if gain_s < COST_RATIO_MIN * max(split.step_s for split in splits.values()):
        return {}, even_s
    mean = sum(speeds.values()) / len(speeds)
    wanted = {host: max(EQUAL_WEIGHT // 4, round(EQUAL_WEIGHT * speed / mean)) for host, speed in speeds.items()}
    return ({} if wanted == dict(weights) else wanted), even_s


def stragglers(turn: Turn) -> list[Straggler]:
    """Who is one now, the most expensive first."""
    found = [track.found for track in turn.state.tracks.values() if track.found is not None]
    return sorted(found, key=lambda each: (-each.cost_ratio, each.rank))
