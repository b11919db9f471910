"""The one function that decides: `decide(state, event, now) -> Decision`.

Read `ABSORB` (what each event means) and `CONVERGE` (what is missing between what is known and what is wanted), in this
order: a turn absorbs one event and then asks every rule once. Rules are levels, not edges: each looks at the facts
afresh, so an event that was lost or repeated changes nothing but when a rule acts. What an action should lead to is
never assumed; it is absorbed when its own event arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.core import (
    charges,
    checkpoints,
    cluster,
    files,
    generations,
    gpus,
    hang,
    health,
    interruption,
    leaving,
    membership,
    pace,
    preflight,
    profiling,
    quorum,
    repeats,
    saving,
    servers,
    standby,
    stragglers,
    workers,
)
from keepstep.core import events as e
from keepstep.core.actions import Measure, Report
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.state import Decision, State, Turn
from keepstep.errors import ExitCode


def initial_state(job: JobSpec, policy: Policy, now: float) -> State:
    """What a node knows before its first event; `now` in unix seconds on its own clock."""
    return State(job, policy, now)


def decide(state: State, event: e.Event, now: float) -> Decision:
    """Turn one event into the next state, the actions to perform in order, and the reasons.

    Pure: equal arguments give equal answers. `now` is unix seconds on the node's own clock and never goes back.
    """
    turn = Turn(state, now)
    if state.exit_code is not None:
        return turn.decision()
    ABSORB[type(event)](turn, event)
    for rule in CONVERGE:
        rule(turn)
        if turn.state.exit_code is not None:
            break
    return turn.decision()


def _on_operation_failed(turn: Turn, event: e.OperationFailed) -> None:
    """An action failed and may be tried again; a store that fails raises an alarm, training goes on."""
    turn.landed(event.operation, turn.now + event.retry_s)
    turn.because(Reason.OPERATION_FAILED, f"{event.operation}: {event.error}")
    checkpoints.release(turn, event.operation)
    if event.operation.startswith(workers.STOPPING):
        workers.on_stuck(turn, event.operation.removeprefix(workers.STOPPING), event.error)
    if event.operation.startswith(("upload:", "alone:", "commit:", "head", "fetch:", "files:")):
        if turn.state.store.available:
            turn.do(Report(Measure.STORE_AVAILABLE, 0.0), Reason.STORE_UNAVAILABLE, event.error)
            turn.set_store(available=False, failing_since=turn.now)


def _on_store_refused(turn: Turn, event: e.StoreRefused) -> None:
    """The store said no for good. Before anything trained, that ends the job; later it is an alarm."""
    turn.landed(event.operation, turn.now + 30.0)
    if event.operation in (gpus.KEEPING, charges.KEEPING):  # no reason to save nothing any more
        turn.because(Reason.OPERATION_FAILED, event.detail)
        return
    checkpoints.release(turn, event.operation)
    turn.set_store(refused=event.detail, available=False, failing_since=turn.state.store.failing_since or turn.now)
    turn.do(Report(Measure.STORE_AVAILABLE, 0.0), Reason.STORE_REFUSES, event.detail)
    if turn.state.seen_generation == 0:
        turn.leave(ExitCode.STORE_REFUSED, f"the store refuses: {event.detail}", Reason.STORE_REFUSES)


def _on_records_changed(turn: Turn, event: e.RecordsChanged) -> None:
    """Several records changed, one after the other."""
    for change in event.changes:
        ABSORB[type(change)](turn, change)


ABSORB: dict[type, Callable[[Turn, Any], None]] = {
    e.AgentStarted: checkpoints.on_agent_started,
    e.LeaseGranted: membership.on_lease_granted,
    e.LeaseRenewed: membership.on_lease_renewed,
    e.LeaseLost: membership.on_lease_lost,
    e.ClusterRead: cluster.on_cluster_read,
    e.RecordSeen: cluster.on_record_seen,
    e.RecordGone: cluster.on_record_gone,
    e.RecordsChanged: _on_records_changed,
    e.RecordPut: cluster.on_record_put,
    e.PutRefused: cluster.on_put_refused,
    e.OperationFailed: _on_operation_failed,
    e.WorkerStarted: workers.on_worker_started,
    e.WorkerHello: workers.on_worker_hello,
    e.WorkerImported: standby.on_worker_imported,
    e.StandbyReady: standby.on_standby_ready,
    e.StandbyGone: standby.on_standby_gone,
    e.WorkerJoined: workers.on_worker_joined,
    e.WorkerDivides: workers.on_worker_divides,
    e.WorkerFingerprinted: repeats.on_worker_fingerprinted,
    e.WorkerRestored: workers.on_worker_restored,
    e.FirstStepCompleted: workers.on_first_step,
    e.StepsSampled: workers.on_steps_sampled,
    e.PulseSampled: hang.on_pulse_sampled,
    e.StacksCollected: hang.on_stacks_collected,
    e.WorkerProfiled: profiling.on_worker_profiled,
    e.WorkerEvaluates: hang.on_worker_evaluates,
    e.LayoutAnnounced: checkpoints.on_layout_announced,
    e.SlabsLacking: checkpoints.on_slabs_lacking,
    e.SnapshotSealed: checkpoints.on_snapshot_sealed,
    e.SnapshotVerified: checkpoints.on_snapshot_verified,
    e.SnapshotBad: checkpoints.on_snapshot_bad,
    e.SnapshotUploaded: checkpoints.on_snapshot_uploaded,
    e.ReplicasCompared: saving.on_replicas_compared,
    e.CheckpointCommitted: saving.on_checkpoint_committed,
    e.CommitRefused: saving.on_commit_refused,
    e.HeadRead: generations.on_head_read,
    e.StoreRefused: _on_store_refused,
    e.FilesCopied: files.on_files_copied,
    e.FilesSettled: files.on_files_settled,
    e.FilesKept: files.on_files_kept,
    e.FilesPutBack: files.on_files_put_back,
    e.FilesStuck: files.on_files_stuck,
    e.EtcdJoined: quorum.on_etcd_joined,
    e.SnapshotFetched: workers.on_snapshot_fetched,
    e.SnapshotUnwanted: workers.on_snapshot_unwanted,
    e.CheckpointCorrupt: workers.on_checkpoint_corrupt,
    e.StrainsChanged: health.on_strains_changed,
    e.GpusSampled: gpus.on_gpus_sampled,
    e.CordonsRead: gpus.on_cordons_read,
    e.CordonsKept: gpus.on_cordons_kept,
    e.ChargesKept: charges.on_charges_kept,
    e.HostChecked: preflight.on_host_checked,
    e.EnteredSampled: interruption.on_entered_sampled,
    e.WorkerExited: workers.on_worker_exited,
    e.InterruptionNoticed: interruption.on_interruption_noticed,
    e.TimerFired: lambda turn, event: None,  # nothing but time has passed; the rules look at it
}

CONVERGE: tuple[Callable[[Turn], None], ...] = (
    membership.keep_lease,
    membership.register,
    membership.claim_leadership,
    quorum.keep_members,
    interruption.tell,
    gpus.judge,
    workers.stop_older,
    checkpoints.verify,
    files.keep,
    membership.acknowledge,
    stragglers.judge,
    preflight.lead,
    generations.lead,
    preflight.check,
    workers.start,
    servers.start,
    charges.keep,
    standby.keep,
    hang.watch,
    profiling.take,
    interruption.hold,
    checkpoints.upload,
    pace.tell_committable,
    workers.write_orders,
    checkpoints.drop_outgrown,
    workers.report_status,
    generations.give_up_waiting,
    leaving.leave_together,
)
