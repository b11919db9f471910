"""Who keeps the job's etcd: a member whose host is lost is replaced on a host that lives."""

from __future__ import annotations

from keepstep.core.actions import JoinEtcd, UseEtcd
from keepstep.core.events import EtcdJoined
from keepstep.core.reasons import Reason
from keepstep.core.records import EtcdRecord
from keepstep.core.state import Turn
from keepstep.core.values import evolve

LOST_AFTER_S = 15.0
"""A member that is away for longer is replaced: a shorter absence costs less than copying the data."""

_SAID_S = 5.0
REPLACEABLE_FROM = 3
"""With fewer members the loss of one takes the majority away."""


def keep_members(turn: Turn) -> None:
    """Ask those members who are known; the leader names another host for a lost one, and that host joins."""
    state = turn.state
    if len(state.job.etcd_hosts) < REPLACEABLE_FROM:
        return
    seen = state.cluster.etcd
    if seen is None:
        if turn.leads:
            turn.put(EtcdRecord(state.job.etcd_hosts), Reason.ETCD_MEMBERS)
        return
    record = seen.record
    if record.hosts != (state.etcd_used or state.job.etcd_hosts):
        turn.set(etcd_used=record.hosts)
        turn.do(UseEtcd(record.hosts), Reason.ETCD_MEMBERS, ", ".join(record.hosts))
    if record.joining == state.job.host and turn.has_lease:
        turn.attempt(JoinEtcd("etcd", record.leaving, record.hosts), Reason.ETCD_JOINS, f"for {record.leaving}")
    elif turn.leads and state.cluster.whole:
        _replace(turn, record)


def _replace(turn: Turn, record: EtcdRecord) -> None:
    """Name a live host for a member that is lost; one at a time, and one that can not join is replaced in turn."""
    if record.joining and not _is_lost(turn, record.joining):
        return
    lost = record.joining or next((host for host in record.hosts if _is_lost(turn, host)), "")
    spare = next((h for h in turn.state.job.hosts if h in turn.state.cluster.nodes and h not in record.hosts), "")
    if lost and spare:
        hosts = tuple(spare if host == lost else host for host in record.hosts)
        changed = EtcdRecord(hosts, joining=spare, leaving=record.leaving or lost)
        turn.put(changed, Reason.ETCD_MEMBER_LOST, f"{lost}; {spare} takes its place")


def _is_lost(turn: Turn, host: str) -> bool:
    since = turn.state.absent.get(host)
    if since is None:
        return False
    if turn.now < since + LOST_AFTER_S:
        turn.wake(since + LOST_AFTER_S)
        return False
    return True


def on_etcd_joined(turn: Turn, event: EtcdJoined) -> None:
    """This host keeps etcd now, and says so."""
    turn.landed(event.operation, turn.now + _SAID_S)  # its record is put meanwhile
    seen = turn.state.cluster.etcd
    if seen is not None and seen.record.joining == turn.state.job.host:
        turn.put(evolve(seen.record, joining="", leaving=""), Reason.ETCD_JOINS, "done")
