"""What the leader does: propose the next generation, settle it, steer it while it trains, end it.

Each function looks at what is and puts the one record that is missing. The order of the rules in `lead` is the
protocol: propose when the world is broken, settle when all members have acknowledged, steer while all is well.
"""

from __future__ import annotations

from keepstep.core import distrust, elastic, files, gpus, hang, leaving, pace, pausing, preflight, repeats, saving
from keepstep.core.actions import ReadHead, WatchAll
from keepstep.core.causes import FailureCause
from keepstep.core.distrust import choose_resume, held_by_all
from keepstep.core.events import HeadRead
from keepstep.core.failures import Charges
from keepstep.core.fingerprints import ANY_STEP
from keepstep.core.launch.parameter_server import SERVED
from keepstep.core.reasons import Reason
from keepstep.core.records import AckRecord, CordonRecord, Failure, GenerationRecord, Member, Phase
from keepstep.core.restarts import describe, judge, root_cause
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import acks_of, acks_of_fresh, leavers
from keepstep.core.world import durable_step, end, is_done, saved_text, statuses_of, store_answers
from keepstep.errors import ExitCode

HEAD_S = 10.0
"""How long a restart from the hosts' memory waits to hear what the store holds."""
REPAIR_S = 600.0
"""How long a job that ends for a GPU's sake may take to save what is sealed."""


def lead(turn: Turn) -> None:
    """The leader's part; nothing for anybody else."""
    if not turn.leads:
        return
    if not turn.state.cluster.whole:
        turn.attempt(WatchAll("watch"), Reason.LEADS)
        return
    generation = turn.generation
    sick = gpus.missed(turn)
    ready = generation is not None and generation.phase is Phase.READY
    if sick and not (ready and generation is not None and is_done(turn, generation)):
        _end_for_repair(turn, generation, sick)
    elif generation is None or (generation.phase is Phase.ENDED and not turn.is_over):
        _propose_first(turn, generation)
    elif generation.phase is Phase.FORMING:
        if not elastic.stands(turn, generation):
            _propose(turn, generation, Reason.MEMBERSHIP_CHANGED)
        elif turn.state.store.head_known and _head_generation(turn) > generation.number:
            _propose(turn, generation, Reason.COMMIT_FENCED)
        else:
            _settle(turn, generation)
    elif generation.phase is Phase.READY:
        broken = why_broken(turn, generation)
        if broken in repeats.AGAIN:
            _propose(turn, repeats.once_more(turn, generation, broken), broken)
        elif broken is not None:
            _propose(turn, generation, broken)
        else:
            saving.steer(turn, generation)


def on_head_read(turn: Turn, event: HeadRead) -> None:
    """HEAD was read for the generation that is forming."""
    turn.landed(event.operation)
    store_answers(turn)
    turn.set_store(head=event.head, head_known=True, files=event.files, files_generation=event.files_generation)
    if event.charges is not None:
        turn.set_store(charges=event.charges)


def why_broken(turn: Turn, generation: GenerationRecord) -> Reason | None:
    """Why a ready generation can not go on; None while it can."""
    nodes, tally = turn.state.cluster.nodes, turn.state.cluster.tally
    if turn.state.job.strategy in SERVED and is_done(turn, generation):
        return None
    if tally.gone:
        lost = any(member.host not in nodes for member in generation.members)
        return Reason.NODE_LOST if lost else Reason.NODE_REPLACED
    if tally.failed:
        return Reason.WORKER_FAILED
    if hang.hangs(turn, generation):
        return Reason.WORLD_HANGS
    if saving.drain_is_late(turn, generation):
        return Reason.DRAIN_TOO_SLOW
    if turn.interrupted:
        return None
    return Reason(generation.pause) if pausing.is_over(turn, generation) else repeats.why_again(turn, generation)


def failures_seen(turn: Turn, generation: GenerationRecord) -> tuple[Failure, ...]:
    """What broke this generation, or, while it is forming, what had broken the one before; one per host and cause."""
    found = list(generation.failures) if generation.phase is Phase.FORMING else []
    statuses = statuses_of(turn, generation)
    found += [status.failure for status in statuses.values() if status.failure is not None]
    if generation.phase is Phase.READY:
        if hang.hangs(turn, generation):
            found += hang.failures_of(turn, generation, statuses)
        nodes = turn.state.cluster.nodes
        for rank, member in enumerate(generation.members):
            step = statuses[member.host].step if member.host in statuses else 0
            if member.host not in nodes:
                found.append(Failure(FailureCause.HOST_LOST, member.host, turn.now, rank, step))
            elif nodes[member.host].record.node_id != member.node_id:
                found.append(Failure(FailureCause.AGENT_LOST, member.host, turn.now, rank, step))
    unique: dict[tuple[str, FailureCause], Failure] = {}
    for failure in found:
        unique.setdefault((failure.host, failure.cause), failure)
    return tuple(unique.values())


def _next_number(turn: Turn, generation: GenerationRecord | None) -> int:
    """One more than anything that anybody, HEAD included, has ever seen."""
    state = turn.state
    seen = [node.record.seen_generation for node in state.cluster.nodes.values()]
    last = generation.number if generation is not None else 0
    return max(state.seen_generation, _head_generation(turn), last, *seen, 0) + 1


def _head_generation(turn: Turn) -> int:
    """The newest generation that the store knows of."""
    store = turn.state.store
    return max(store.files_generation, 0 if store.head is None else store.head.generation)


def _propose_first(turn: Turn, ended: GenerationRecord | None) -> None:
    """The first generation of this run, or of an etcd that lost its data: all hosts, numbered above HEAD's."""
    state, base = turn.state, _base(turn, ended)
    if turn.interrupted:
        if state.cluster.requests:
            text = f"interrupted; {saved_text(turn, base.durable_step)}"
            _end_before_it_began(turn, ended, ExitCode.INTERRUPTED, text, Reason.NOTHING_TO_SAVE)
        return
    if not elastic.gathered(turn) or not know_head(turn) or not preflight.lets_start(turn):
        return
    if turn.state.preflight.code:
        _end_before_it_began(turn, ended, *preflight.verdict(turn))
        return
    failures = (state.failure,) if state.failure is not None else ()
    record = GenerationRecord(
        number=_next_number(turn, ended),
        phase=Phase.FORMING,
        leader=state.job.node_id,
        members=elastic.chosen(turn, base.members),
        failures=failures,
        snapshot_every=pace.first_every(turn),
        run=base.run or state.job.run,
        durable_step=state.store.head.step if state.store.head is not None else 0,
        ledger=base.ledger,
        failed_at=base.failed_at,
        restarts=base.restarts,
        save_s=base.save_s,
        skipped=base.skipped,
        falls=base.falls,
        distrusted=base.distrusted,
        served=base.served,
        settled=base.settled,
        repeat=repeats.begun(turn, base.repeat),
    )
    fresh = acks_of_fresh(turn.state.cluster, record)
    if len(fresh) < len(record.members):
        turn.put(record, Reason.FIRST_GENERATION, f"generation {record.number}")
    elif fresh:
        _start_world(turn, record, fresh)


def _base(turn: Turn, ended: GenerationRecord | None) -> GenerationRecord:
    """What the first generation of this run, or of an etcd that lost its data, goes on from; and what charges stand."""
    base = turn.state.last_generation
    if base is None or (ended is not None and base.number <= ended.number) or base.phase is Phase.ENDED:
        own, charged = turn.state.job.node_id, turn.state.store.charges or Charges()
        return GenerationRecord(0, Phase.FORMING, own, (), ledger=charged.ledger, restarts=charged.restarts)
    return base


def _end_before_it_began(turn: Turn, ended: GenerationRecord | None, code: int, text: str, reason: Reason) -> None:
    """There will be no world: all who are there leave."""
    base = _base(turn, ended)
    members = elastic.chosen(turn, base.members)
    if members:
        number, run = _next_number(turn, ended), base.run or turn.state.job.run
        end(turn, evolve(base, number=number, members=members, run=run), code, text, reason)


def _propose(turn: Turn, old: GenerationRecord, reason: Reason, only: tuple[Member, ...] = ()) -> None:
    """A new generation of whoever is there, so that all stop what is older; it becomes ready once all hosts are."""
    members = only or elastic.chosen(turn, old.members)
    if not members and not turn.state.cluster.cordons:
        return
    record = evolve(
        old,
        number=_next_number(turn, old),
        phase=Phase.FORMING,
        leader=turn.state.job.node_id,
        members=members,
        leaving=leavers(turn.state.cluster, old, members),
        failures=failures_seen(turn, old),
        drain_step=0,
        save_step=0,
        root=None,
        lost_steps=0,
        pause="",
        profile=None,
        repeat=old.repeat if reason in repeats.AGAIN else old.repeat.given_up(),
    )
    turn.put(record, reason, f"generation {record.number}, {len(members)} of {len(turn.state.job.trainers)} hosts")


def _settle(turn: Turn, generation: GenerationRecord) -> None:
    """All members acknowledged: judge what happened, agree on the resume step, and let the world start."""
    know_head(turn)  # read while the members still stop, so that nobody waits for it later
    records = acks_of(turn.state.cluster, generation)
    if records is None:
        return
    if turn.interrupted:
        saving.salvage(turn, generation, records)
        return
    if not elastic.gathered(turn):
        turn.because(Reason.WAITING_FOR_HOSTS)
        return
    if turn.state.preflight.code:
        end(turn, generation, *preflight.verdict(turn))
        return
    if not preflight.lets_start(turn):
        return
    _start_world(turn, generation, records)


def _start_world(turn: Turn, generation: GenerationRecord, records: list[AckRecord]) -> None:
    """Nothing older runs any more: judge what went wrong, fix where to go on from, and mark the generation ready."""
    failures = _merged(generation.failures, records)
    root = root_cause(failures)
    verdict = judge(turn.state.policy, generation, root, turn.now, _passed(turn, generation, records))
    if not verdict.restart and root is not None:
        if verdict.reason is Reason.BUDGET_SPENT and turn.state.store.available and not know_head(turn):
            return  # what was committed meanwhile renews the budget
        text = f"{verdict.reason.value}: {describe(root)}"
        if root.cause is FailureCause.GPU_FAULT:  # what is sealed was made before, and its digest is that of the others
            if not saving.is_saved(turn, generation, records, root.at + REPAIR_S):
                return
            text = f"{text}; {saved_text(turn, durable_step(turn, generation))}"
            generation = evolve(generation, durable_step=durable_step(turn, generation))
        end(turn, generation, verdict.exit_code, text, verdict.reason, root)
        return
    if turn.now < verdict.not_before:
        turn.wake(verdict.not_before)
        turn.because(Reason.BACKING_OFF)
        return
    corrupt = {manifest for ack in records for manifest in ack.corrupt}
    if corrupt - set(turn.state.store.corrupt):
        turn.set_store(corrupt=tuple(sorted(corrupt | set(turn.state.store.corrupt))), head_known=False)
    held = held_by_all(turn, generation, records)
    at_hand = bool(held) or files.has_own(turn, generation)
    if not know_head(turn) and not (at_hand and _is_head_late(turn)):
        return
    if turn.state.store.available and not verdict.skip and distrust.changes(turn, generation, root, records):
        know_head(turn)
        return
    resume, reason = choose_resume(turn, held)
    start = 0 if resume is None else resume.step
    state, head, again = turn.state, turn.state.store.head, root is not None or generation.repeat.moved == ANY_STEP
    ready = evolve(
        generation,
        phase=Phase.READY,
        failures=failures,
        resume=resume,
        durable_step=head.step if state.store.head_known and head is not None else generation.durable_step,
        lost_steps=max(0, max(ack.completed for ack in records) - start) if again else 0,
        ledger=verdict.ledger,
        failed_at=pace.failed(turn, generation, root),
        snapshot_every=min(generation.snapshot_every, pace.first_every(turn)),
        restarts=generation.restarts + (1 if root is not None else 0),
        skipped=(*generation.skipped, verdict.skip) if verdict.skip else generation.skipped,
        falls=() if verdict.skip else distrust.falls_of(generation, root, records),  # the state was not to blame
        root=root,
        leaving=(),
        feeders=elastic.feeders(turn),
        settled=generation.number,
        files=files.wanted(turn, records),
        repeat=repeats.at_start(generation, resume, root, records),
    )
    if turn.put(ready, Reason.WORLD_STARTS, f"generation {ready.number} at step {start}"):
        turn.because(reason)
        if len(ready.members) < elastic.wanted_hosts(turn):
            turn.because(Reason.WORLD_SHRINKS, f"{len(ready.members)} of {len(state.job.trainers)} hosts")
        if root is not None:
            turn.because(verdict.reason, describe(root))


def _end_for_repair(turn: Turn, generation: GenerationRecord | None, sick: tuple[CordonRecord, ...]) -> None:
    """Hosts are cordoned that the job can not do without: save what is sealed, and have them repaired."""
    state, root = turn.state, gpus.failure_of(sick)
    former = () if generation is None else generation.members
    members = gpus.present(turn, former)
    named = "; ".join(f"{cordon.host}: {cordon.why}" for cordon in sick)
    text = f"{root.cause.value}: {named}; the job can not do without {', '.join(cordon.host for cordon in sick)}"
    if generation is None or generation.phase is Phase.ENDED:
        until = max(state.absent.values(), default=turn.now) + state.policy.elastic.wait_for_return
        if turn.is_over:
            return
        if state.absent and turn.now < until:
            turn.wake(until)
            return  # who is not there yet would wait for the others in vain
        base, run = _base(turn, generation), state.job.run
        record = evolve(base, number=_next_number(turn, generation), members=members, run=base.run or run)
        end(turn, record, ExitCode.HARDWARE, text, Reason.REPAIR_WANTED, root)
    elif generation.phase is Phase.READY or members != generation.members:
        _propose(turn, generation, Reason.REPAIR_WANTED, members)
    else:
        acks = acks_of(turn.state.cluster, generation)
        if acks is not None and saving.is_saved(turn, generation, acks, root.at + REPAIR_S):
            durable = durable_step(turn, generation)
            record = evolve(generation, durable_step=durable)
            text = f"{text}; {saved_text(turn, durable)}"
            end(turn, record, ExitCode.HARDWARE, text, Reason.REPAIR_WANTED, root)


def _passed(turn: Turn, generation: GenerationRecord, records: list[AckRecord]) -> int:
    """The newest committed step, or what the last world has reached where it fell back to an older state."""
    head = turn.state.store.head
    committed = max(generation.durable_step, 0 if head is None else head.step)
    return min(committed, max(ack.completed for ack in records))


def _merged(failures: tuple[Failure, ...], acks: list[AckRecord]) -> tuple[Failure, ...]:
    """What was known, and what the members say of their own workers."""
    unique = {(failure.host, failure.cause): failure for failure in failures}
    for ack in acks:
        if ack.failure is not None:
            unique.setdefault((ack.failure.host, ack.failure.cause), ack.failure)
    return tuple(unique.values())


def know_head(turn: Turn) -> bool:
    """Whether HEAD is known for the generation at hand; asks for it, and claims it from an older one, where not."""
    state = turn.state
    if not state.job.has_store or state.store.head_known:
        return True
    failing_s = turn.now - state.store.failing_since if state.store.failing_since is not None else 0.0
    if failing_s > state.policy.elastic.wait_for_return and not any(slab.seal for slab in state.slabs):
        turn.leave(ExitCode.STORE_REFUSED, f"the store can not be read for {failing_s:.0f} s", Reason.STORE_UNAVAILABLE)
        return False
    forming = turn.generation
    claims = forming is not None and forming.phase is Phase.FORMING and forming.settled > 0
    claim, run = (forming.number, forming.run) if forming is not None and claims else (0, "")
    without = (*state.store.corrupt, *state.store.distrusted)
    read = ReadHead("head", without, claim, run, files.watches(turn))
    if turn.attempt(read, Reason.HEAD_WANTED):
        turn.set_store(head_asked_at=turn.now)
    return False


def _is_head_late(turn: Turn) -> bool:
    """Whether the store has failed, or has not answered for so long: then nobody who has a state waits for it."""
    store = turn.state.store
    if store.available and turn.now < store.head_asked_at + HEAD_S:
        turn.wake(store.head_asked_at + HEAD_S)
        return False
    return True


def give_up_waiting(turn: Turn) -> None:
    """Too few hosts, or no coordinator, for too long: save what can be saved, and have it tried again elsewhere."""
    state, generation = turn.state, turn.generation
    if turn.is_over:
        return
    # how many are there the leader sees; the others have its word
    if turn.has_lease and (not turn.leads or not state.cluster.whole or elastic.enough(turn) or gpus.missed(turn)):
        if state.short_since is not None:
            turn.set(short_since=None)
        return
    if state.short_since is None:
        turn.set(short_since=turn.now)
    since = state.short_since if state.short_since is not None else turn.now
    limit_s = FIRST_ARRIVAL_S if state.seen_generation == 0 else state.policy.elastic.wait_for_return
    if turn.now < since + limit_s:
        turn.wake(since + limit_s)
        return
    if not turn.has_lease and not leaving.save_alone(turn, since + limit_s):
        return
    missing = ", ".join(h for h in state.job.hosts if h not in state.cluster.nodes or h in state.cluster.cordons)
    what = f"hosts missing for {limit_s:.0f} s: {missing}" if turn.has_lease else f"no coordinator for {limit_s:.0f} s"
    text = f"{what}; {saved_text(turn, durable_step(turn, generation))}" if generation is not None else what
    if turn.leads and (generation is None or generation.phase is Phase.ENDED):
        _end_before_it_began(turn, generation, ExitCode.TOO_FEW_HOSTS, text, Reason.HOSTS_MISSING)
    elif turn.leads and generation is not None:
        end(turn, generation, ExitCode.TOO_FEW_HOSTS, text, Reason.HOSTS_MISSING)
    if turn.now >= since + limit_s + 10.0 or not turn.has_lease:
        turn.leave(ExitCode.TOO_FEW_HOSTS, text, Reason.HOSTS_MISSING)
    else:
        turn.wake(since + limit_s + 10.0)


FIRST_ARRIVAL_S = 900.0
"""How long hosts may take to appear at first; the platform's own toolkit waits as long for their names to resolve."""
