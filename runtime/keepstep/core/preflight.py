"""Before hosts train: each is looked at, all are held against each other, and policy says what becomes of a bad one.

The leader names who is to be checked (`PreflightPlan`), each of these says what it found (`PreflightRecord`), and the
leader judges once all have, or once the bound is over: who does not answer holds up nobody for longer. With `warn`
nobody waits at all. Then the checks run beside the first moments of the script, which has been started by then: what
they take from it is the same on all hosts, so that it tells them apart all the same. With `exclude` and `fail` nothing
else runs, and what is measured is more exact.
"""

from __future__ import annotations

from keepstep.core import elastic
from keepstep.core.actions import CheckHost, Measure, Report
from keepstep.core.events import HostChecked
from keepstep.core.launch import trains
from keepstep.core.preflight_records import Guest, PreflightPlan, PreflightRecord
from keepstep.core.preflight_verdict import Flaw, find_flaws, partners_of
from keepstep.core.reasons import Reason
from keepstep.core.records import CordonRecord, Phase
from keepstep.core.state import Turn
from keepstep.core.values import evolve

LIMIT_S = 20.0
"""How long a preflight may take, from when a node hears of it: ten times what it takes where all is well."""
_ANSWER_S = 2.0
"""Of it, for the answer to come to the leader."""
_SCRIPT_S = 3.0
"""With `warn`, how long a worker may take until it runs; one that never says so is not waited for."""
_RESTORE_S = 8.0
"""With `warn`, how long a host may take to have the state that its worker starts from; then it is not waited for."""
_OTHERS_MAX = 8
_BY = "preflight"
_QUIET, _BESIDE = "quiet", "beside"
_HINT = "start the job again to get other hosts"


# --- what happens ----------------------------------------------------------------------------------------------------


def note_plan(turn: Turn, plan: PreflightPlan) -> None:
    """A plan was put; what was doubted of its guests is being looked at now."""
    own = turn.state.preflight
    if plan.number > own.seen:
        guests = {guest.host for guest in plan.guests}
        stale = tuple(host for host in own.stale if host not in guests)
        _set(turn, seen=plan.number, seen_at=turn.now, stale=stale, unsure=True)


def doubt(turn: Turn, host: str) -> None:
    """A host was lost, or is cordoned no more: it is to be checked before it trains again."""
    own = turn.state.preflight
    barred = tuple(each for each in own.barred if each[0] != host or host in turn.state.cluster.cordons)
    _set(turn, stale=tuple(sorted({*own.stale, host})), barred=barred, unsure=True)


def look_again(turn: Turn) -> None:
    """A node came, or has changed."""
    if not turn.state.preflight.unsure:
        _set(turn, unsure=True)


def on_host_checked(turn: Turn, event: HostChecked) -> None:
    """This host was looked at."""
    turn.landed(event.operation)
    job = turn.state.job
    _, number, how = event.operation.split(":")
    if int(number) == turn.state.preflight.ran:
        found = PreflightRecord(
            job.host, job.node_id, int(number), event.machine, how == _QUIET, event.rates, event.complaints,
            event.links, event.seconds,
        )  # fmt: skip
        _set(turn, found=found)


# --- on each host ----------------------------------------------------------------------------------------------------


def check(turn: Turn) -> None:
    """Look at this host where the plan has it among its guests, once, and say what was found."""
    seen, own, job = turn.state.cluster.plan, turn.state.preflight, turn.state.job
    if seen is None or not _is_on(turn):
        return
    plan = seen.record
    if not any(guest.node_id == job.node_id for guest in plan.guests):
        return
    if own.found is not None and own.found.number == plan.number:
        told = turn.state.cluster.checks.get(job.host)
        if told is None or told.record != own.found:
            turn.put(own.found, Reason.PREFLIGHT_DONE, f"{own.found.seconds:.1f} s")
    if own.ran >= plan.number or turn.interrupted or turn.is_over or _comes_too_early(turn):
        return
    left_s = own.seen_at + LIMIT_S - _ANSWER_S - turn.now
    quiet = _waits(turn) and not turn.processes
    operation = f"preflight:{plan.number}:{_QUIET if quiet else _BESIDE}"
    if left_s <= 0:
        _set(turn, ran=plan.number)
    elif turn.attempt(CheckHost(operation, partners_of(plan, job.host), left_s, quiet), Reason.PREFLIGHT_STARTS):
        _set(turn, ran=plan.number)


def _comes_too_early(turn: Turn) -> bool:
    """Whether it would keep from a worker what that needs to come to its script; only where nobody waits for it."""
    if _waits(turn):
        return False
    state, generation = turn.state, turn.generation
    until = max((worker.started_at + _SCRIPT_S for worker in state.workers if not worker.greeted), default=0.0)
    if generation is not None and turn.is_member and state.spawned < generation.number:
        rank = generation.rank_of(state.job.host)
        until = state.ready_at + _RESTORE_S if trains(state.job, rank) else until
    if turn.now < until:
        turn.wake(until)
    return turn.now < until


# --- the leader ------------------------------------------------------------------------------------------------------


def lead(turn: Turn) -> None:
    """Name those who are to be checked, and judge them once they have answered or had their time."""
    if not _is_on(turn) or not turn.leads or not turn.state.cluster.whole or turn.interrupted or turn.is_over:
        return
    plan = _open(turn)
    if plan is None:
        _plan(turn)
    else:
        _await(turn, plan)
    for host, why in turn.state.preflight.barred:
        if host not in turn.state.cluster.cordons:
            turn.put(CordonRecord(host, _BY, turn.now, why), Reason.PREFLIGHT_EXCLUDES, f"{host}: {why}")


def _await(turn: Turn, plan: PreflightPlan) -> None:
    """Judge those who are there still, once all of them have answered or the bound is over."""
    asked = [guest for guest in plan.guests if _is_there(turn, guest)]
    until = turn.state.preflight.seen_at + LIMIT_S
    if turn.now < until and not all(_has_answered(turn, plan, guest) for guest in asked):
        turn.wake(until)
        return
    lost = [guest.host for guest in plan.guests if guest not in asked]
    if lost:  # what becomes of the world without them is decided elsewhere
        turn.because(Reason.PREFLIGHT_FINDS, f"{', '.join(lost)}: lost before an answer came")
    _judge(turn, evolve(plan, guests=tuple(asked)))


def lets_start(turn: Turn) -> bool:
    """Whether a world may start, or grow, as far as the checks go; the leader's to ask."""
    if not _waits(turn):
        return True
    own = turn.state.preflight
    barred = any(host not in turn.state.cluster.cordons for host, _ in own.barred)
    if barred or _open(turn) is not None or _guests(turn):
        turn.because(Reason.PREFLIGHT_AWAITED)
        return False
    return True


def verdict(turn: Turn) -> tuple[int, str, Reason]:
    """With what exit code, and why, a bad host ends the job."""
    own = turn.state.preflight
    return own.code, own.text, Reason.PREFLIGHT_FAILS


def _plan(turn: Turn) -> None:
    """Have those checked who were not since they came, once a world of them could start, or has."""
    own, generation = turn.state.preflight, turn.generation
    trains = generation is not None and generation.phase is Phase.READY
    if not own.unsure or not (trains or _waits(turn)):
        return
    hosts = _guests(turn)
    if not hosts:
        _set(turn, unsure=False)
        return
    if not trains and not elastic.gathered(turn):
        return
    former = turn.state.cluster.plan
    number = 1 + max(own.seen, 0 if former is None else former.record.number)
    others = generation.members if trains and generation is not None else ()
    partners = tuple(
        Guest(member.host, member.node_id, member.address, member.peer_port)
        for member in others if member.host not in hosts
    )  # fmt: skip
    plan = PreflightPlan(number, tuple(_guest(turn, host) for host in hosts), partners[:_OTHERS_MAX])
    turn.put(plan, Reason.PREFLIGHT_PLANNED, ", ".join(hosts[:8]) + (" ..." if len(hosts) > 8 else ""))


def _guests(turn: Turn) -> list[str]:
    """The hosts that may train and were not checked since they came; one that trains need not be for a new agent."""
    state, generation = turn.state, turn.generation
    plan, own = state.cluster.plan, state.preflight
    judged = () if plan is None or own.judged < plan.record.number else plan.record.guests
    silent = {guest.node_id for guest in judged}
    found = []
    for host in elastic.candidates(turn):
        node, told = state.cluster.nodes[host].record, state.cluster.checks.get(host)
        has_told = told is not None and told.record.node_id == node.node_id
        if host not in own.stale and (has_told or node.node_id in silent):
            continue
        trains = generation is not None and generation.phase is not Phase.ENDED and generation.rank_of(host) >= 0
        if node.fresh or not trains:
            found.append(host)
    return found


def _guest(turn: Turn, host: str) -> Guest:
    node = turn.state.cluster.nodes[host].record
    return Guest(host, node.node_id, node.address, node.peer_port)


def _open(turn: Turn) -> PreflightPlan | None:
    """The plan that is to be judged; None where there is none, or none of its guests is there any more."""
    seen = turn.state.cluster.plan
    if seen is None or seen.record.number <= turn.state.preflight.judged:
        return None
    return seen.record if any(_is_there(turn, guest) for guest in seen.record.guests) else None


def _is_there(turn: Turn, guest: Guest) -> bool:
    seen = turn.state.cluster.nodes.get(guest.host)
    return seen is not None and seen.record.node_id == guest.node_id


def _has_answered(turn: Turn, plan: PreflightPlan, guest: Guest) -> bool:
    seen = turn.state.cluster.checks.get(guest.host)
    return seen is not None and (seen.record.number, seen.record.node_id) == (plan.number, guest.node_id)


def _judge(turn: Turn, plan: PreflightPlan) -> None:
    """Say what is wrong, and do about it what the policy wants."""
    records = {
        host: seen.record for host, seen in turn.state.cluster.checks.items() if host in turn.state.cluster.nodes
    }
    # a new leader judges the plan once more: who was kept out by then is no news
    out = turn.state.cluster.cordons
    flaws = tuple(flaw for flaw in find_flaws(plan, records) if any(host not in out for host in flaw.hosts))
    _set(turn, judged=plan.number, unsure=True)
    if not flaws:
        turn.because(Reason.PREFLIGHT_PASSED, f"{len(plan.guests)} hosts")
    for flaw in flaws:
        turn.do(Report(Measure.PREFLIGHT_FLAW, 1, flaw.check.value), Reason.PREFLIGHT_FINDS, flaw.tell())
    respond, generation = turn.state.policy.health.preflight, turn.generation
    trains = generation is not None and generation.phase is not Phase.ENDED and generation.settled > 0
    if respond == "fail" and flaws and not trains:
        text = f"preflight: {'; '.join(flaw.tell() for flaw in flaws)}; {_HINT}"
        _set(turn, code=int(flaws[0].exit_code), text=text)
    elif respond != "warn":
        _bar(turn, [flaw for flaw in flaws if len(flaw.hosts) == 1])


def _bar(turn: Turn, flaws: list[Flaw]) -> None:
    """Keep bad hosts out, as far as the world can do without them: a slow world is better than none."""
    barred = dict(turn.state.preflight.barred)
    out = {*turn.state.cluster.cordons, *barred}
    spare = min(len(elastic.candidates(turn)) - elastic.limits(turn)[0], elastic.cordons_max(turn) - len(out))
    for flaw in flaws:
        (host,) = flaw.hosts
        if host not in barred and spare > 0:
            spare -= 1
            barred[host] = f"{flaw.check.value}: {flaw.text}"
    _set(turn, barred=tuple(barred.items()))


def _is_on(turn: Turn) -> bool:
    return turn.state.policy.health.preflight != "off"


def _waits(turn: Turn) -> bool:
    """Whether a world waits for the checks."""
    return turn.state.policy.health.preflight in ("exclude", "fail")


def _set(turn: Turn, **changes: object) -> None:
    turn.set(preflight=evolve(turn.state.preflight, **changes))
