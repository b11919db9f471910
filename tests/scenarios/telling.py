"""A turn as one line of a transcript: `now event -> reasons => actions`."""

from __future__ import annotations

from dataclasses import fields

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.hang import tell
from keepstep.core.preflight_records import PreflightPlan
from keepstep.core.records import AckRecord, GenerationRecord, Record, StatusRecord
from keepstep.core.state import Decision


def tell_turn(now: float, event: e.Event, decision: Decision) -> str:
    why = "; ".join(f"{note.reason.value} {note.detail}".strip() for note in decision.notes)
    what = ", ".join(tell_action(action) for action in decision.actions)
    return f"{now:7.2f} {tell_event(event)} -> {why}" + (f" => {what}" if what else "")


def tell_event(event: e.Event) -> str:
    match event:
        case e.RecordSeen() | e.RecordPut():
            return f"{event.kind} {tell_record(event.record)}"
        case e.RecordGone():
            return f"{event.kind} {event.key}"
        case e.RecordsChanged():
            return f"{event.kind} {', '.join(tell_event(change) for change in event.changes)}"
        case e.OperationFailed() | e.StoreRefused() | e.PutRefused():
            return f"{event.kind} {event.operation}"
        case e.SnapshotSealed():
            return f"{event.kind} {event.seal.slab}@{event.seal.step}"
        case e.SnapshotVerified() | e.SnapshotBad():
            return f"{event.kind} {event.slab}@{event.step}"
        case e.WorkerExited():
            how = f"signal {event.signal}" if event.signal is not None else f"code {event.exit_code}"
            return f"{event.kind} {how}"
    return event.kind


def tell_record(record: Record) -> str:
    match record:
        case GenerationRecord():
            text = f"generation {record.number} {record.phase.value}"
            for name in ("drain_step", "save_step", "durable_step", "restarts", "exit_code"):
                if getattr(record, name):
                    text += f" {name}={getattr(record, name)}"
            if record.repeat.step:
                text += f" repeat={record.repeat.step}"
            return text
        case StatusRecord() if record.fingerprint is not None:
            return f"{record.key} {record.standing.value}, step {record.fingerprint.step} {record.fingerprint.value}"
        case StatusRecord():
            stalled = f" stalled: {tell(record.stall)}" if record.stall is not None else ""
            return f"{record.key} {record.standing.value}{stalled}"
        case PreflightPlan():
            others = f", beside {[guest.host for guest in record.others]}" if record.others else ""
            return f"preflight {record.number} of {[guest.host for guest in record.guests]}{others}"
        case AckRecord():
            return f"{record.key} holds {[held.step for held in record.held]}"
    return record.key


def tell_action(action: a.Action) -> str:
    match action:
        case a.Put():
            return f"put {tell_record(action.record)}"
        case a.StartWorker():
            return f"start worker rank {action.rank}" + (f" from {action.standby}" if action.standby else "")
        case a.StartServer():
            return f"start server {action.server_id}: {action.title}"
        case a.SweepStore() if action.restoring:
            return f"sweep store but for {', '.join(action.restoring)}"
        case a.StopWorker() | a.RevokeLease() | a.SweepStore() | a.WatchAll():
            return _words(type(action).__name__)
        case a.ProfileWorker():
            return f"profile worker rank {action.rank}, of {' and '.join(action.profile.hosts)}"
        case a.Report():
            return f"report {action.measure.value} {action.label} {round(action.value, 3)}".replace("  ", " ")
        case a.WriteOrders():
            return _orders(action)
        case a.ReadHead():
            without = f" without {list(action.without)}" if action.without else ""
            return f"read head{without}" + (f", claimed for generation {action.claim}" if action.claim else "")
        case a.CompareReplicas():
            return f"compare replicas of step {action.step}"
        case a.KeepCharges():
            return f"keep charges: {action.charges.restarts} restarts, {len(action.charges.ledger)} failures"
        case a.CommitCheckpoint():
            return f"commit step {action.step}"
        case a.CheckHost():
            how = "quiet" if action.quiet else "beside the job"
            return f"check host, lines to {[peer.host for peer in action.peers]}, {action.limit_s:.0f} s, {how}"
        case a.WriteFailure():
            return f"write failure: {action.text}".replace("\n", " / ")
    values = (getattr(action, field.name) for field in fields(action) if field.name != "operation")
    return " ".join([_words(type(action).__name__), *(str(value) for value in values)])


def _orders(orders: a.WriteOrders) -> str:
    text = f"orders every {orders.snapshot_every} grant {orders.grant}"
    if orders.fingerprint:
        text += f" look at {orders.fingerprint}"
    if orders.restore_slab >= 0:
        text += f" restore {orders.restore_slab}@{orders.restore_step}"
    if orders.hold:
        text += f" hold to {orders.drain_step}" if orders.drain_step else " hold"
    return text


def _words(name: str) -> str:
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
