"""How many hosts train together: who is chosen, and when those who are there are enough."""

from __future__ import annotations

from keepstep.core.launch.parameter_server import SERVED
from keepstep.core.records import GenerationRecord, Member, Phase
from keepstep.core.state import Turn


def limits(turn: Turn) -> tuple[int, int]:
    """The fewest and the most hosts that may train together; `all` is as many as the job has, without its spares."""
    whole, wanted = len(turn.state.job.trainers), turn.state.policy.elastic.hosts
    least = 2 if turn.state.job.strategy in SERVED else 1  # a chief alone has nobody to serve it
    high = whole if wanted.max == "all" else min(max(wanted.max, least), whole)
    high = max(min(high, whole - turn.state.policy.elastic.spares), least)
    return (high if wanted.min == "all" else min(max(wanted.min, least), high)), high


def wanted_hosts(turn: Turn) -> int:
    """How many hosts are to train where all are well: no more than the policy allows, no cordoned one."""
    state = turn.state
    usable = len(state.job.trainers) - sum(1 for host in state.cluster.cordons if host in state.job.trainers)
    return min(limits(turn)[1], usable)


def cordons_max(turn: Turn) -> int:
    """How many hosts may be out for all that keepstep itself finds wrong with them."""
    return max(1, len(turn.state.job.trainers) * turn.state.policy.health.cordon_max // 100)


def may_do_without(turn: Turn, host: str) -> bool:
    """Whether keepstep itself may cordon a host: enough others are there, and not too many out."""
    known = turn.state.cluster.cordons
    cordoned = [each for each in turn.state.job.trainers if each in known or turn.in_flight(f"put:cordons/{each}")]
    if host in cordoned or host not in turn.state.job.trainers:
        return False
    others = [each for each in candidates(turn) if each != host and each not in cordoned]
    return len(cordoned) < cordons_max(turn) and len(others) >= limits(turn)[0]


def candidates(turn: Turn) -> list[str]:
    """The hosts that are there and may take part, in the job's order."""
    nodes, cordons = turn.state.cluster.nodes, turn.state.cluster.cordons
    return [host for host in turn.state.job.trainers if host in nodes and host not in cordons]


def feeders(turn: Turn) -> tuple[Member, ...]:
    """The hosts that are there and run tf.data's service, in the job's order."""
    nodes = turn.state.cluster.nodes
    return _members(turn, [host for host in _wanted_feeders(turn) if host in nodes])


def _wanted_feeders(turn: Turn) -> list[str]:
    return [host for host in turn.state.job.feeders if host not in turn.state.cluster.cordons]


def _members(turn: Turn, hosts: list[str]) -> tuple[Member, ...]:
    nodes = (turn.state.cluster.nodes[host].record for host in hosts)
    return tuple(Member(node.host, node.node_id, node.address, node.port_base, node.peer_port) for node in nodes)


def chosen(turn: Turn, former: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members of a world of whoever is there, in rank order; former members stay where there are too many."""
    hosts, most = candidates(turn), limits(turn)[1]
    if len(hosts) > most:
        known = {member.host for member in former}
        kept = set(sorted(hosts, key=lambda host: host not in known)[:most])
        hosts = [host for host in hosts if host in kept]
    ranked = [member.host for member in former]
    if sorted(ranked) == sorted(hosts):
        hosts = ranked  # who stays keeps its rank, and what is the rank's own
    return _members(turn, hosts)


def stands(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether a generation that forms has the members that would be chosen now."""
    cluster = turn.state.cluster
    here = len(cluster.nodes)
    if not (cluster.tally.gone or cluster.cordons or _has_others(turn)) and here == len(generation.members):
        return True
    return generation.members == chosen(turn, generation.members)


def _there(turn: Turn) -> int:
    """How many hosts are there and may take part."""
    cluster = turn.state.cluster
    return len(candidates(turn)) if cluster.cordons or _has_others(turn) else len(cluster.nodes)


def _has_others(turn: Turn) -> bool:
    """Whether the job has hosts that are not there to train."""
    return bool(turn.state.job.feeders or turn.state.job.idle)


def enough(turn: Turn) -> bool:
    """Whether as many hosts are there as the policy asks for at the least, and somebody to feed them.

    Who trains already is not ended because nobody feeds any more: it may need no more data.
    """
    generation = turn.generation
    fed = not turn.state.job.feeders or bool(feeders(turn))
    trains = generation is not None and generation.phase is Phase.READY
    return _there(turn) >= limits(turn)[0] and (fed or trains)


def gathered(turn: Turn) -> bool:
    """Whether to start with those who are there: all that are wanted, or enough, with the others waited for."""
    state, there = turn.state, _there(turn)
    if not enough(turn):
        return False
    wanted = _wanted_feeders(turn)
    if there >= wanted_hosts(turn) and len(feeders(turn)) == len(wanted):
        return True
    awaited = {*state.job.trainers, *wanted} - set(state.cluster.cordons)
    lost = [since for host, since in state.absent.items() if host in awaited]
    until = max(lost, default=turn.now) + state.policy.elastic.wait_for_return
    if turn.now < until:
        turn.wake(until)
        return False
    return True


def may_grow(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether a host that is out could take part: it has been there for a lease's time, so it is no mere flicker."""
    state = turn.state
    if state.policy.elastic.grow == "off" or len(generation.members) >= wanted_hosts(turn):
        return False
    since = turn.now - state.policy.coordination.lease
    return any(state.sighted.get(host, turn.now) <= since for host in candidates(turn) if generation.rank_of(host) < 0)
