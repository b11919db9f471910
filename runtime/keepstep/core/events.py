"""What sensors report. Past tense; immutable; JSON-able through the journal. `kind` tells them apart there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keepstep.core.files_events import FilesCopied as FilesCopied
from keepstep.core.files_events import FilesKept as FilesKept
from keepstep.core.files_events import FilesPutBack as FilesPutBack
from keepstep.core.files_events import FilesSettled as FilesSettled
from keepstep.core.files_events import FilesStuck as FilesStuck
from keepstep.core.hang_events import PulseSampled as PulseSampled
from keepstep.core.hang_events import StacksCollected as StacksCollected
from keepstep.core.hang_events import WorkerEvaluates as WorkerEvaluates
from keepstep.core.records import Record, StoredObject
from keepstep.core.standby_events import StandbyGone as StandbyGone
from keepstep.core.standby_events import StandbyReady as StandbyReady
from keepstep.core.standby_events import WorkerImported as WorkerImported


@dataclass(frozen=True, slots=True)
class SlabSeal:
    """A seal as it stands in the control page: slab, completed step, sequence, bytes of the file."""

    slab: int
    step: int
    sequence: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """What HEAD in the store says: the newest committed checkpoint, and the newest generation that claimed it."""

    generation: int
    step: int
    digest: str
    manifest: str


@dataclass(frozen=True, slots=True)
class FirstError:
    """What a worker wrote down before it died."""

    error_type: str
    message: str
    at: float
    step: int
    victim: bool


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """The first event of every journal.

    What a former agent left with init: slabs and their sizes, seals, and the newest generation it had seen (so that
    numbers do not repeat where etcd lost its data, too).
    """

    slabs: tuple[tuple[int, int], ...] = ()
    seals: tuple[SlabSeal, ...] = ()
    seen_generation: int = 0
    kind: Literal["agent_started"] = "agent_started"


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    lease: int
    deadline: float
    kind: Literal["lease_granted"] = "lease_granted"


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    lease: int
    deadline: float
    kind: Literal["lease_renewed"] = "lease_renewed"


@dataclass(frozen=True, slots=True)
class LeaseLost:
    lease: int
    kind: Literal["lease_lost"] = "lease_lost"


@dataclass(frozen=True, slots=True)
class ClusterRead:
    """Everything under the job's prefix, read afresh; replaces whatever was known.

    `whole` where that is true of what members say of themselves, too, and all of that is watched from now on.
    """

    records: tuple[tuple[Record, int], ...]
    whole: bool = True
    kind: Literal["cluster_read"] = "cluster_read"


@dataclass(frozen=True, slots=True)
class RecordSeen:
    record: Record
    revision: int
    kind: Literal["record_seen"] = "record_seen"


@dataclass(frozen=True, slots=True)
class RecordGone:
    key: str
    revision: int
    kind: Literal["record_gone"] = "record_gone"


@dataclass(frozen=True, slots=True)
class RecordsChanged:
    """What the watch had to tell since it was last asked, in order: a node that lags takes it all in one turn."""

    changes: tuple[RecordSeen | RecordGone, ...]
    kind: Literal["records_changed"] = "records_changed"


@dataclass(frozen=True, slots=True)
class RecordPut:
    """Our own put succeeded."""

    operation: str
    record: Record
    revision: int
    kind: Literal["record_put"] = "record_put"


@dataclass(frozen=True, slots=True)
class PutRefused:
    """Our own put lost its comparison: somebody else was first."""

    operation: str
    kind: Literal["put_refused"] = "put_refused"


@dataclass(frozen=True, slots=True)
class OperationFailed:
    """An action failed in operation (not a bug). `retry_s`: when it may be tried again."""

    operation: str
    error: str
    retry_s: float = 0.2
    kind: Literal["operation_failed"] = "operation_failed"


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    worker_id: str
    pid: int
    kind: Literal["worker_started"] = "worker_started"


@dataclass(frozen=True, slots=True)
class WorkerHello:
    worker_id: str
    kind: Literal["worker_hello"] = "worker_hello"


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """An instrumented `fit` or `join()` was entered."""

    worker_id: str
    how: str
    kind: Literal["worker_joined"] = "worker_joined"


@dataclass(frozen=True, slots=True)
class WorkerRestored:
    worker_id: str
    step: int
    seconds: float
    data_s: float = 0.0
    kind: Literal["worker_restored"] = "worker_restored"


@dataclass(frozen=True, slots=True)
class FirstStepCompleted:
    worker_id: str
    step: int
    at: float
    kind: Literal["first_step_completed"] = "first_step_completed"


@dataclass(frozen=True, slots=True)
class StepsSampled:
    """A sample of the heartbeat ring; means over the sampled steps, seconds, 0 where not measured.

    `waited_s` is what all sampled steps together spent on waiting for the gradients of others.
    """

    worker_id: str
    entered: int
    completed: int
    step_s: float = 0.0
    snapshot_s: float = 0.0
    waited_s: float = 0.0
    kind: Literal["steps_sampled"] = "steps_sampled"


@dataclass(frozen=True, slots=True)
class LayoutAnnounced:
    worker_id: str
    layout: int
    size_bytes: int
    kind: Literal["layout_announced"] = "layout_announced"


@dataclass(frozen=True, slots=True)
class SnapshotSealed:
    """A snapshot is whole; it kept the training waiting for so many `seconds`."""

    worker_id: str
    seal: SlabSeal
    seconds: float = 0.0
    kind: Literal["snapshot_sealed"] = "snapshot_sealed"


@dataclass(frozen=True, slots=True)
class SnapshotVerified:
    operation: str
    slab: int
    step: int
    digest: str
    kind: Literal["snapshot_verified"] = "snapshot_verified"


@dataclass(frozen=True, slots=True)
class SnapshotBad:
    operation: str
    slab: int
    step: int
    detail: str
    kind: Literal["snapshot_bad"] = "snapshot_bad"


@dataclass(frozen=True, slots=True)
class SnapshotUploaded:
    operation: str
    generation: int
    step: int
    digest: str
    objects: tuple[StoredObject, ...]
    seconds: float
    kind: Literal["snapshot_uploaded"] = "snapshot_uploaded"


@dataclass(frozen=True, slots=True)
class ReplicasCompared:
    """Hosts, and tensors that they hold otherwise than most do, or than any other does where there is no majority."""

    generation: int
    step: int
    differ: tuple[tuple[str, str], ...]
    kind: Literal["replicas_compared"] = "replicas_compared"


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    operation: str
    generation: int
    step: int
    manifest: str
    seconds: float
    kind: Literal["checkpoint_committed"] = "checkpoint_committed"


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """HEAD belongs to a newer generation."""

    operation: str
    generation: int
    step: int
    kind: Literal["commit_refused"] = "commit_refused"


@dataclass(frozen=True, slots=True)
class EtcdJoined:
    """A member of the job's etcd runs here now."""

    operation: str
    kind: Literal["etcd_joined"] = "etcd_joined"


@dataclass(frozen=True, slots=True)
class HeadRead:
    """`files` is the manifest of the newest committed checkpoint of the script's own files; empty for none.

    `files_generation` is the newest generation that claimed their HEAD.
    """

    operation: str
    head: Head | None
    files: str = ""
    files_generation: int = 0
    kind: Literal["head_read"] = "head_read"


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """The store said no for good: no permission, no such bucket, read-only, full."""

    operation: str
    detail: str
    kind: Literal["store_refused"] = "store_refused"


@dataclass(frozen=True, slots=True)
class SnapshotFetched:
    operation: str
    seal: SlabSeal
    digest: str
    kind: Literal["snapshot_fetched"] = "snapshot_fetched"


@dataclass(frozen=True, slots=True)
class SnapshotUnwanted:
    """What was fetched came when a worker ran already: it was let go of."""

    operation: str
    kind: Literal["snapshot_unwanted"] = "snapshot_unwanted"


@dataclass(frozen=True, slots=True)
class CheckpointCorrupt:
    """A checkpoint did not read back as its manifest says."""

    operation: str
    manifest: str
    detail: str
    kind: Literal["checkpoint_corrupt"] = "checkpoint_corrupt"


@dataclass(frozen=True, slots=True)
class EnteredSampled:
    """The step a held worker has entered, read at least 10 ms after `hold` was set."""

    operation: str
    worker_id: str
    entered: int
    kind: Literal["entered_sampled"] = "entered_sampled"


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker's process is gone. `seals` is what the control page says now.

    `frozen` where it was stopped by a signal when it was killed.
    """

    worker_id: str
    at: float
    exit_code: int | None = None
    signal: int | None = None
    error: FirstError | None = None
    out_of_memory: bool = False
    frozen: bool = False
    entered: int = 0
    completed: int = 0
    seals: tuple[SlabSeal, ...] = ()
    kind: Literal["worker_exited"] = "worker_exited"


@dataclass(frozen=True, slots=True)
class InterruptionNoticed:
    source: str
    deadline: float
    kind: Literal["interruption_noticed"] = "interruption_noticed"


@dataclass(frozen=True, slots=True)
class TimerFired:
    kind: Literal["timer_fired"] = "timer_fired"


Event = (
    AgentStarted | LeaseGranted | LeaseRenewed | LeaseLost | ClusterRead | RecordSeen | RecordGone | RecordsChanged
    | RecordPut | PutRefused | OperationFailed | WorkerStarted | WorkerHello | WorkerJoined | WorkerRestored
    | FirstStepCompleted | StepsSampled | LayoutAnnounced | SnapshotSealed | SnapshotVerified | SnapshotBad
    | SnapshotUploaded | ReplicasCompared | CheckpointCommitted | CommitRefused | HeadRead | StoreRefused
    | SnapshotFetched | CheckpointCorrupt | EtcdJoined | EnteredSampled | WorkerExited | InterruptionNoticed
    | TimerFired | PulseSampled | StacksCollected | WorkerEvaluates | WorkerImported | StandbyReady | StandbyGone
    | SnapshotUnwanted | FilesCopied | FilesSettled | FilesKept | FilesPutBack | FilesStuck
)  # fmt: skip
