"""Absorbing what the coordinator says: records appear, change, vanish; what is older than what is known is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.core import gpus, pace, preflight
from keepstep.core.actions import ForgetRecords, Measure, Report
from keepstep.core.events import ClusterRead, PutRefused, RecordGone, RecordPut, RecordSeen
from keepstep.core.facts import Recovery
from keepstep.core.preflight_records import PreflightPlan, PreflightRecord
from keepstep.core.reasons import Reason
from keepstep.core.records import (
    AckRecord,
    CordonRecord,
    EtcdRecord,
    GenerationRecord,
    LeaderRecord,
    NodeRecord,
    OrderRecord,
    Phase,
    Record,
    RequestRecord,
    StatusRecord,
    UploadRecord,
)
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import (
    OF_NODES,
    Cluster,
    Seen,
    known_revision,
    with_generation,
    with_node,
    with_status,
    with_upload,
)

_PUT_AGAIN_S = 0.05


def on_cluster_read(turn: Turn, event: ClusterRead) -> None:
    """Take the whole view anew: after a watch was lost nothing of the old one can be trusted."""
    watched = max((revision for _, revision in event.records), default=0)
    turn.set(cluster=Cluster(synced=True, watched=watched, whole=event.whole))
    for record, revision in event.records:
        _take(turn, record, revision)
    if event.whole:
        turn.landed("watch")
        absent, sighted, nodes = turn.state.absent, turn.state.sighted, turn.state.cluster.nodes
        turn.set(absent={host: absent.get(host, turn.now) for host in turn.state.job.hosts if host not in nodes})
        turn.set(sighted={host: sighted.get(host, turn.now) for host in nodes})


def on_record_seen(turn: Turn, event: RecordSeen) -> None:
    """A record was written by somebody, perhaps by this node."""
    if not _is_news(turn, event.record, event.revision):
        turn.because(Reason.STALE_REVISION, event.record.key)
        return
    turn.set_cluster(watched=event.revision)
    _take(turn, event.record, event.revision)


def on_record_put(turn: Turn, event: RecordPut) -> None:
    """This node's put succeeded: know it at once, the watch will only repeat it."""
    turn.landed(event.operation)
    own = isinstance(event.record, OF_NODES) and not turn.state.cluster.whole  # nothing else tells of it
    if _is_news(turn, event.record, event.revision) or own:
        _take(turn, event.record, event.revision)


def _is_news(turn: Turn, record: Record, revision: int) -> bool:
    """Whether a record was written after what is known of its key, its vanishing included."""
    cluster = turn.state.cluster
    return revision > known_revision(cluster, record) and revision >= cluster.watched


def on_put_refused(turn: Turn, event: PutRefused) -> None:
    """Somebody else was first; the watch will bring what they wrote."""
    turn.landed(event.operation, turn.now + _PUT_AGAIN_S)
    turn.because(Reason.STALE_REVISION, event.operation)


def on_record_gone(turn: Turn, event: RecordGone) -> None:
    """A record vanished, as leased ones do with their node."""
    turn.set_cluster(watched=max(event.revision, turn.state.cluster.watched))
    cluster, key = turn.state.cluster, event.key
    kind, _, name = key.partition("/")

    def without(records: Mapping[str, Seen[Any]], at: str) -> dict[str, Seen[Any]]:
        return {k: seen for k, seen in records.items() if k != at or seen.revision > event.revision}

    match kind:
        case "alive":
            if name in cluster.nodes and cluster.nodes[name].revision <= event.revision:
                turn.set(cluster=with_node(turn.state.cluster, name, None))
            if name not in turn.state.cluster.nodes:
                _set_presence(turn, name, present=False)
                preflight.doubt(turn, name)
        case "status":
            if name in cluster.statuses and cluster.statuses[name].revision <= event.revision:
                turn.set(cluster=with_status(turn.state.cluster, name, None))
        case "requests":
            turn.set_cluster(requests=without(cluster.requests, name))
        case "orders":
            turn.set_cluster(orders=without(cluster.orders, name))
        case "cordons":
            turn.set_cluster(cordons=without(cluster.cordons, name))
            if name not in turn.state.cluster.cordons:
                gpus.on_uncordoned(turn, name)
            preflight.doubt(turn, name)
        case "checks":
            turn.set_cluster(checks=without(cluster.checks, name))
        case "acks":
            turn.set_cluster(acks=without(cluster.acks, key))
        case "uploads":
            if key in cluster.uploads and cluster.uploads[key].revision <= event.revision:
                turn.set(cluster=with_upload(turn.state.cluster, key, None))
        case "leader" if cluster.leader is not None and cluster.leader.revision <= event.revision:
            turn.set_cluster(leader=None)
        case "etcd" if cluster.etcd is not None and cluster.etcd.revision <= event.revision:
            turn.set_cluster(etcd=None)
        case "preflight" if cluster.plan is not None and cluster.plan.revision <= event.revision:
            turn.set_cluster(plan=None)
        case "generation" if cluster.generation is not None and cluster.generation.revision <= event.revision:
            turn.set(cluster=with_generation(turn.state.cluster, None))
        case _:
            turn.because(Reason.STALE_REVISION, key)


def _take(turn: Turn, record: Record, revision: int) -> None:
    cluster = turn.state.cluster
    match record:
        case NodeRecord():
            turn.set(cluster=with_node(cluster, record.host, Seen(record, revision)))
            _set_presence(turn, record.host, present=True)
            preflight.look_again(turn)
        case LeaderRecord():
            turn.set_cluster(leader=Seen(record, revision))
        case GenerationRecord():
            _take_generation(turn, record, revision)
        case AckRecord():
            turn.set_cluster(acks={**cluster.acks, record.key: Seen(record, revision)})
        case StatusRecord():
            turn.set(cluster=with_status(cluster, record.host, Seen(record, revision)))
        case UploadRecord():
            turn.set(cluster=with_upload(cluster, record.key, Seen(record, revision)))
        case RequestRecord():
            turn.set_cluster(requests={**cluster.requests, record.host: Seen(record, revision)})
        case OrderRecord():
            turn.set_cluster(orders={**cluster.orders, record.order_id: Seen(record, revision)})
        case CordonRecord():
            turn.set_cluster(cordons={**cluster.cordons, record.host: Seen(record, revision)})
        case EtcdRecord():
            turn.set_cluster(etcd=Seen(record, revision))
        case PreflightPlan():
            turn.set_cluster(plan=Seen(record, revision))
            preflight.note_plan(turn, record)
        case PreflightRecord():
            turn.set_cluster(checks={**cluster.checks, record.host: Seen(record, revision)})


def _set_presence(turn: Turn, host: str, present: bool) -> None:
    """Remember since when a host of the job is there, or is not."""
    state = turn.state
    here, away = (state.sighted, state.absent) if present else (state.absent, state.sighted)
    if host in here or host not in state.job.hosts:
        return
    here, away = {**here, host: turn.now}, {name: since for name, since in away.items() if name != host}
    turn.set(sighted=here if present else away, absent=away if present else here)


def _take_generation(turn: Turn, record: GenerationRecord, revision: int) -> None:
    """Know the newest generation, and let go of what belonged to older ones."""
    state = turn.state
    if record.number < state.seen_generation and record.phase is not Phase.ENDED:
        turn.because(Reason.STALE_GENERATION, f"generation {record.number}, {state.seen_generation} is known")
        return
    newer, old = record.number > state.seen_generation, state.last_generation
    of_an_earlier_run = newer and record.phase is Phase.ENDED and not record.has(state.job.node_id)
    turn.set(
        seen_generation=state.seen_generation if of_an_earlier_run else max(record.number, state.seen_generation),
        last_generation=record,
        cluster=with_generation(state.cluster, Seen(record, revision)),
    )
    if record.phase is not Phase.ENDED:
        turn.set(witnessed=record.run)
    if record.together and not (old and old.together):
        turn.set(together_at=turn.now)
    if record.pause and (old is None or newer or not old.pause):
        turn.set(paused_at=turn.now)
    if newer:
        turn.set(held_at=None, entered=-1, uploaded=None)
        turn.set_store(head_known=False, saving_since=None)
    if record.failures and state.recovery is None and record.phase is Phase.FORMING:
        turn.set(recovery=Recovery(fault_at=min(f.at for f in record.failures), learnt_at=turn.now))
    fresh = old is None or old.number != record.number or old.phase is not Phase.READY
    if record.phase is Phase.READY and fresh:
        _take_ready(turn, record)
    if old is None or old.durable_step != record.durable_step:
        turn.do(Report(Measure.DURABLE_STEP, record.durable_step))
        turn.set_store(saving_since=None)
        pace.report(turn, record)
    if turn.leads and old is not None:
        _forget(turn, old, record)


def _forget(turn: Turn, old: GenerationRecord, new: GenerationRecord) -> None:
    """Have deleted what members said in a generation that is over, or of a checkpoint that is committed."""
    if new.number > old.number:
        turn.do(ForgetRecords(f"acks/{old.number}/"))
        turn.do(ForgetRecords(f"uploads/{old.number}/"))
    elif old.save_step and old.save_step <= new.durable_step and old.save_step != new.save_step:
        turn.do(ForgetRecords(f"uploads/{old.number}/{old.save_step}/"))


def _take_ready(turn: Turn, record: GenerationRecord) -> None:
    """The world is fixed: what went wrong before it is accounted for."""
    state = turn.state
    turn.set(ready_at=turn.now)
    turn.do(Report(Measure.GENERATION, record.number))
    if record.root is not None:
        turn.do(Report(Measure.RESTART, 1, record.root.cause.value))
    if record.root is not None or record.lost_steps:
        turn.do(Report(Measure.LOST_STEPS, record.lost_steps))
    if state.failure is not None and state.failure_generation < record.number:
        turn.set(failure=None)
    if state.recovery is not None and not state.recovery.ready_at:
        turn.set(recovery=evolve(state.recovery, ready_at=turn.now))
