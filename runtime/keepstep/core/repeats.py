"""A step is done again with each rank on another host: `health.repeat`.

The all-reduce has all replicas take the same gradients, wrong ones too, so that what now and then computes something
wrong makes no two of them differ. What each rank has computed before does: it hangs on state, batch and seeds alone.

A repeat goes with a checkpoint that is due anyhow. The leader has the step behind it looked at (`beside`), all train
on, and once the checkpoint is committed it ends the generation: the next one goes on from that very checkpoint, with
each rank on the next host (`once_more`). Where the step comes out otherwise, and it can not be told yet whose fault
that is, it is done once more, further on. Whoever leads finds all of it in the generation's record; where something
else ends the generation the repeat is given up, and the next checkpoint comes with another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core import elastic
from keepstep.core.actions import Measure, Report
from keepstep.core.causes import FailureCause
from keepstep.core.fingerprints import ANY_STEP, Doing, Fingerprint, Repeat, WorkerFingerprinted, describe, differing
from keepstep.core.reasons import Reason
from keepstep.core.records import AckRecord, CordonRecord, Failure, GenerationRecord, Resume
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.world import end, saved_text, statuses_of
from keepstep.errors import ExitCode

AGAIN = (Reason.REPEAT_WANTED, Reason.REPEAT_DIFFERS, Reason.SILENT_CORRUPTION)
"""Why a generation goes back to the newest checkpoint although nothing has failed."""

_DOINGS_MAX = 3
"""Then each rank was on three hosts, or twice on one of two: the odd one is known even where it was wrong but once."""

_TOLD_MAX = 400


def on_worker_fingerprinted(turn: Turn, event: WorkerFingerprinted) -> None:
    """This host's worker has done the step that was to be looked at."""
    turn.set_worker(event.worker_id, fingerprint=event.found)


def begun(turn: Turn, former: Repeat) -> Repeat:
    """The first generation's: time is counted from here, or goes on where an etcd had lost its data."""
    counts = turn.state.policy.health.repeat is not None and not former.at
    return evolve(former.given_up(), at=turn.now if counts else former.at)


def beside(turn: Turn, generation: GenerationRecord, save_step: int) -> Repeat:
    """As a checkpoint is asked for: the step behind it is to be looked at, where a repeat is due.

    Not in a world of one, nor from a state that worlds died of, nor where ranks have parts of the batch by their speed.
    """
    repeat, every_s = generation.repeat.given_up(), turn.state.policy.health.repeat
    if every_s is None or repeat.why or turn.now < repeat.at + every_s:
        return repeat
    trusted = all(state.step != save_step for state in generation.distrusted)
    suits = trusted and len(generation.members) > 1 and not generation.weights
    return evolve(repeat, step=save_step + 1) if suits else repeat


def _never(turn: Turn) -> str:
    """Why no step of this job can be done again; empty where it can."""
    job = turn.state.job
    if len(job.trainers) < 2:
        return "one host trains alone"
    if job.strategy != "multi_worker":
        return f"only steps of multi_worker are done again, not of {job.strategy}"
    return "" if job.has_store else "without a store no host can take over another one's rank"


def _told(turn: Turn, generation: GenerationRecord) -> list[Fingerprint] | None:
    """What the members say of the step that is looked at, in rank order; None while it is not done everywhere."""
    step, told = generation.repeat.step, []
    for status in statuses_of(turn, generation).values():
        if status.fingerprint is not None and status.fingerprint.step == step:
            told.append(status.fingerprint)
        elif status.step > step:
            told.append(Fingerprint(step))  # it has not looked: no checkpoint waits for it
    return told if len(told) == len(generation.members) else None


def _doings(generation: GenerationRecord, told: Sequence[Fingerprint]) -> tuple[Doing, ...]:
    hosts, values = tuple(member.host for member in generation.members), tuple(each.value for each in told)
    return *generation.repeat.doings, Doing(hosts, values)


def why_again(turn: Turn, generation: GenerationRecord) -> Reason | None:
    """Why all are to go back to the newest checkpoint now, if they are."""
    repeat = generation.repeat
    if repeat.named in turn.state.cluster.cordons and generation.rank_of(repeat.named) >= 0:
        return Reason.SILENT_CORRUPTION  # what it had part in since is not gone on from
    if not repeat.step or generation.durable_step != repeat.step - 1 or generation.pause:
        return None
    told = _told(turn, generation)
    if told is None or not all(each.value for each in told) or turn.state.cluster.tally.done:
        return None
    doings = _doings(generation, told)
    is_told = len(doings) > 1 and (not differing(doings) or len(suspects(doings)) == 1)
    if is_told or len(doings) == _DOINGS_MAX or elastic.chosen(turn, generation.members) != generation.members:
        return None
    return Reason.REPEAT_WANTED if len(doings) == 1 else Reason.REPEAT_DIFFERS


def once_more(turn: Turn, generation: GenerationRecord, why: Reason) -> GenerationRecord:
    """The generation for the next one to follow: each rank on the next host, and in its record how it did the step."""
    repeat = evolve(generation.repeat, moved=ANY_STEP)
    if why is Reason.SILENT_CORRUPTION:
        return evolve(generation, repeat=repeat.given_up())
    doings = _doings(generation, _told(turn, generation) or ())
    members = (*generation.members[-1:], *generation.members[:-1])
    return evolve(generation, members=members, repeat=evolve(repeat, doings=doings))


def at_start(
    generation: GenerationRecord, resume: Resume | None, root: Failure | None, acks: list[AckRecord]
) -> Repeat:
    """What becomes of the repeat as a world starts: it needs the very checkpoint, and nothing to have failed."""
    repeat = generation.repeat
    if repeat.moved == ANY_STEP:
        repeat = evolve(repeat, moved=max(max([ack.completed, *(held.step for held in ack.held)]) for ack in acks))
    stands = root is None and resume is not None and bool(resume.manifest) and resume.step == repeat.step - 1
    return repeat if stands else repeat.given_up()


def steer(turn: Turn, generation: GenerationRecord) -> bool:
    """The leader's look at a step that is done again; True where nothing else is to be begun meanwhile."""
    repeat = generation.repeat
    if turn.state.policy.health.repeat is None or repeat.why:
        return False
    never = _never(turn)
    if never or not repeat.step:
        return bool(never) and _says_nothing(turn, generation, never, for_good=True)
    told, is_saved = _told(turn, generation), generation.durable_step >= repeat.step - 1
    if told is None:
        return is_saved  # checkpoints wait for it
    for member, each in zip(generation.members, told, strict=True):
        if not each.value:
            why = each.why or f"step {repeat.step} went by unseen"
            return _says_nothing(turn, generation, f"{member.host}: {why}", for_good=bool(each.why))
    if is_saved and not repeat.doings:
        return _says_nothing(turn, generation, "the hosts are other ones by now", for_good=False)
    return is_saved and _judge(turn, generation, _doings(generation, told))


def _says_nothing(turn: Turn, generation: GenerationRecord, why: str, *, for_good: bool) -> bool:
    """Give the repeat up, or all repeats of this job."""
    repeat = evolve(generation.repeat.given_up(), why=why if for_good else "")
    return _count(turn, "nothing", turn.put(evolve(generation, repeat=repeat), Reason.REPEAT_SAYS_NOTHING, why))


def _count(turn: Turn, outcome: str, is_told: bool) -> bool:
    if is_told:
        turn.do(Report(Measure.REPEAT, 1, outcome))
    return True


def _judge(turn: Turn, generation: GenerationRecord, doings: tuple[Doing, ...]) -> bool:
    """The step was done again: it came out the same, or a host has computed something else than the others."""
    step, hosts = f"step {generation.repeat.step}", suspects(doings)
    record = evolve(generation, repeat=evolve(generation.repeat.given_up(), at=turn.now))
    if not differing(doings):
        text = f"{step}: the same on all {len(generation.members)} ranks"
        return _count(turn, "equal", turn.put(record, Reason.STEP_REPEATED, text))
    if not hosts:
        why = f"{step} comes out otherwise on each rank: not all of it is seeded, or hosts have data of their own"
        return _says_nothing(turn, record, why, for_good=True)
    text = f"{step}: {' or '.join(hosts)} computed something else than the others: {describe(doings)[:_TOLD_MAX]}"
    if turn.state.policy.checkpoint.divergence == "stop":
        text = f"{text}; {saved_text(turn, generation.durable_step)}"
        return _count(turn, "corrupt", end(turn, record, ExitCode.HARDWARE, text, Reason.SILENT_CORRUPTION))
    goes_on = turn.state.policy.rule_for(FailureCause.GPU_FAULT, None).respond == "restart"
    if goes_on and len(hosts) == 1 and elastic.may_do_without(turn, hosts[0]):
        record = evolve(record, repeat=evolve(record.repeat, named=hosts[0]))
        turn.put(CordonRecord(hosts[0], "repeat", turn.now, text), Reason.HOST_CORDONED, hosts[0])
    return _count(turn, "corrupt", turn.put(record, Reason.SILENT_CORRUPTION, text))


def suspects(doings: Sequence[Doing]) -> tuple[str, ...]:
    """Whose being wrong explains all that differs: without what it computed, each rank's fingerprints are equal.

    Several where nothing tells them apart; where no host alone explains it, all that have done what differs. None where
    every rank differs and no host explains it: it is the step then that can not be done again. None where none differs.
    """
    ranks = differing(doings)
    wrong = {host: _wrong_by(doings, ranks, host) for rank in ranks[:1] for host in {d.hosts[rank] for d in doings}}
    least = min((count for count in wrong.values() if count), default=0)
    if least:
        return tuple(sorted(host for host, count in wrong.items() if count == least))
    if len(ranks) == len(doings[0].hosts):
        return ()
    return tuple(sorted({each.hosts[rank] for rank in ranks for each in doings}))


def _wrong_by(doings: Sequence[Doing], ranks: Sequence[int], host: str) -> int:
    """How often a host was wrong if nobody else ever was; 0 where that does not explain what differs."""
    count = 0
    for rank in ranks:
        others = {each.values[rank] for each in doings if each.hosts[rank] != host}
        if len(others) > 1:
            return 0
        count += sum(1 for each in doings if each.hosts[rank] == host and each.values[rank] not in others)
    return count
