"""What sensors report. Past tense; immutable; JSON-able through the journal. `kind` tells them apart there."""

from __future__ import annotations

from typing import Literal

from keepstep.core.charge_events import ChargesKept as ChargesKept
from keepstep.core.failures import Charges
from keepstep.core.failures import FirstError as FirstError
from keepstep.core.files_events import FilesCopied as FilesCopied
from keepstep.core.files_events import FilesKept as FilesKept
from keepstep.core.files_events import FilesPutBack as FilesPutBack
from keepstep.core.files_events import FilesSettled as FilesSettled
from keepstep.core.files_events import FilesStuck as FilesStuck
from keepstep.core.fingerprints import WorkerFingerprinted as WorkerFingerprinted
from keepstep.core.gpu_events import CordonsKept as CordonsKept
from keepstep.core.gpu_events import CordonsRead as CordonsRead
from keepstep.core.gpu_events import GpusSampled as GpusSampled
from keepstep.core.hang_events import PulseSampled as PulseSampled
from keepstep.core.hang_events import StacksCollected as StacksCollected
from keepstep.core.hang_events import WorkerDivides as WorkerDivides
from keepstep.core.hang_events import WorkerEvaluates as WorkerEvaluates
from keepstep.core.health_events import StrainsChanged as StrainsChanged
from keepstep.core.preflight_events import HostChecked as HostChecked
from keepstep.core.profiles import WorkerProfiled as WorkerProfiled
from keepstep.core.records import Record, StoredObject
from keepstep.core.slab_events import LayoutAnnounced as LayoutAnnounced
from keepstep.core.slab_events import SlabsLacking as SlabsLacking
from keepstep.core.splits import Split
from keepstep.core.standby_events import StandbyGone as StandbyGone
from keepstep.core.standby_events import StandbyReady as StandbyReady
from keepstep.core.standby_events import WorkerImported as WorkerImported
from keepstep.core.values import frozen


@frozen
class SlabSeal:
    """A seal as it stands in the control page: slab, completed step, sequence, bytes of the file."""

    slab: int
    step: int
    sequence: int
    size_bytes: int


@frozen
class Head:
    """What HEAD in the store says: the newest committed checkpoint, and the newest generation that claimed it."""

    generation: int
    step: int
    digest: str
    manifest: str


@frozen
class AgentStarted:
    """The first event of every journal.

    What a former agent left with init: slabs and their sizes, seals, and the newest generation it had seen (so that
    numbers do not repeat where etcd lost its data, too).
    """

    slabs: tuple[tuple[int, int], ...] = ()
    seals: tuple[SlabSeal, ...] = ()
    seen_generation: int = 0
    kind: Literal["agent_started"] = "agent_started"


@frozen
class LeaseGranted:
    lease: int
    deadline: float
    kind: Literal["lease_granted"] = "lease_granted"


@frozen
class LeaseRenewed:
    lease: int
    deadline: float
    kind: Literal["lease_renewed"] = "lease_renewed"


@frozen
class LeaseLost:
    lease: int
    kind: Literal["lease_lost"] = "lease_lost"


@frozen
class ClusterRead:
    """Everything under the job's prefix, read afresh; replaces whatever was known.

    `whole` where that is true of what members say of themselves, too, and all of that is watched from now on.
    """

    records: tuple[tuple[Record, int], ...]
    whole: bool = True
    kind: Literal["cluster_read"] = "cluster_read"


@frozen
class RecordSeen:
    record: Record
    revision: int
    kind: Literal["record_seen"] = "record_seen"


@frozen
class RecordGone:
    key: str
    revision: int
    kind: Literal["record_gone"] = "record_gone"


@frozen
class RecordsChanged:
    """What the watch had to tell since it was last asked, in order: a node that lags takes it all in one turn."""

    changes: tuple[RecordSeen | RecordGone, ...]
    kind: Literal["records_changed"] = "records_changed"


@frozen
class RecordPut:
    """Our own put succeeded."""

    operation: str
    record: Record
    revision: int
    kind: Literal["record_put"] = "record_put"


@frozen
class PutRefused:
    """Our own put lost its comparison: somebody else was first."""

    operation: str
    kind: Literal["put_refused"] = "put_refused"


@frozen
class OperationFailed:
    """An action failed in operation (not a bug). `retry_s`: when it may be tried again."""

    operation: str
    error: str
    retry_s: float = 0.2
    kind: Literal["operation_failed"] = "operation_failed"


@frozen
class WorkerStarted:
    worker_id: str
    pid: int
    kind: Literal["worker_started"] = "worker_started"


@frozen
class WorkerHello:
    worker_id: str
    kind: Literal["worker_hello"] = "worker_hello"


@frozen
class WorkerJoined:
    """An instrumented `fit` or `join()` was entered."""

    worker_id: str
    how: str
    kind: Literal["worker_joined"] = "worker_joined"


@frozen
class WorkerRestored:
    worker_id: str
    step: int
    seconds: float
    data_s: float = 0.0
    kind: Literal["worker_restored"] = "worker_restored"


@frozen
class FirstStepCompleted:
    worker_id: str
    step: int
    at: float
    kind: Literal["first_step_completed"] = "first_step_completed"


@frozen
class StepsSampled:
    """A sample of the heartbeat ring; means over the sampled steps, seconds, 0 where not measured.

    `waited_s` is what all sampled steps together spent on waiting for the gradients of others, `splits` where the time
    of those went that were measured, of each of the host's ranks.
    """

    worker_id: str
    entered: int
    completed: int
    step_s: float = 0.0
    snapshot_s: float = 0.0
    waited_s: float = 0.0
    splits: tuple[Split, ...] = ()
    kind: Literal["steps_sampled"] = "steps_sampled"


@frozen
class SnapshotSealed:
    """A snapshot is whole; it kept the training waiting for so many `seconds`."""

    worker_id: str
    seal: SlabSeal
    seconds: float = 0.0
    kind: Literal["snapshot_sealed"] = "snapshot_sealed"


@frozen
class SnapshotVerified:
    operation: str
    slab: int
    step: int
    digest: str
    kind: Literal["snapshot_verified"] = "snapshot_verified"


@frozen
class SnapshotBad:
    operation: str
    slab: int
    step: int
    detail: str
    kind: Literal["snapshot_bad"] = "snapshot_bad"


@frozen
class SnapshotUploaded:
    operation: str
    generation: int
    step: int
    digest: str
    objects: tuple[StoredObject, ...]
    seconds: float
    kind: Literal["snapshot_uploaded"] = "snapshot_uploaded"


@frozen
class ReplicasCompared:
    """Hosts, and tensors that they hold otherwise than most do, or than any other does where there is no majority."""

    generation: int
    step: int
    differ: tuple[tuple[str, str], ...]
    kind: Literal["replicas_compared"] = "replicas_compared"


@frozen
class CheckpointCommitted:
    operation: str
    generation: int
    step: int
    manifest: str
    seconds: float
    kind: Literal["checkpoint_committed"] = "checkpoint_committed"


@frozen
class CommitRefused:
    """HEAD belongs to a newer generation."""

    operation: str
    generation: int
    step: int
    kind: Literal["commit_refused"] = "commit_refused"


@frozen
class EtcdJoined:
    """A member of the job's etcd runs here now."""

    operation: str
    kind: Literal["etcd_joined"] = "etcd_joined"


@frozen
class HeadRead:
    """`files`: the manifest of the script's own, claimed by `files_generation`; `charges`: for a first one alone."""

    operation: str
    head: Head | None
    files: str = ""
    files_generation: int = 0
    charges: Charges | None = None
    kind: Literal["head_read"] = "head_read"


@frozen
class StoreRefused:
    """The store said no for good: no permission, no such bucket, read-only, full."""

    operation: str
    detail: str
    kind: Literal["store_refused"] = "store_refused"


@frozen
class SnapshotFetched:
    operation: str
    seal: SlabSeal
    digest: str
    kind: Literal["snapshot_fetched"] = "snapshot_fetched"


@frozen
class SnapshotUnwanted:
    """What was fetched came when a worker ran already: it was let go of."""

    operation: str
    kind: Literal["snapshot_unwanted"] = "snapshot_unwanted"


@frozen
class CheckpointCorrupt:
    """A checkpoint did not read back as its manifest says."""

    operation: str
    manifest: str
    detail: str
    kind: Literal["checkpoint_corrupt"] = "checkpoint_corrupt"


@frozen
class EnteredSampled:
    """The step a held worker has entered, read at least 10 ms after `hold` was set."""

    operation: str
    worker_id: str
    entered: int
    kind: Literal["entered_sampled"] = "entered_sampled"


@frozen
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


@frozen
class InterruptionNoticed:
    source: str
    deadline: float
    kind: Literal["interruption_noticed"] = "interruption_noticed"


@frozen
class TimerFired:
    kind: Literal["timer_fired"] = "timer_fired"


Event = (
    AgentStarted | LeaseGranted | LeaseRenewed | LeaseLost | ClusterRead | RecordSeen | RecordGone | RecordsChanged
    | RecordPut | PutRefused | OperationFailed | WorkerStarted | WorkerHello | WorkerJoined | WorkerRestored
    | FirstStepCompleted | StepsSampled | LayoutAnnounced | SnapshotSealed | SnapshotVerified | SnapshotBad
    | SnapshotUploaded | ReplicasCompared | CheckpointCommitted | CommitRefused | HeadRead | StoreRefused | ChargesKept
    | SnapshotFetched | CheckpointCorrupt | EtcdJoined | EnteredSampled | WorkerExited | InterruptionNoticed
    | TimerFired | PulseSampled | StacksCollected | WorkerEvaluates | WorkerImported | StandbyReady | StandbyGone
    | SnapshotUnwanted | FilesCopied | FilesSettled | FilesKept | FilesPutBack | FilesStuck | WorkerFingerprinted
    | StrainsChanged | WorkerDivides | WorkerProfiled | GpusSampled | CordonsRead | CordonsKept | HostChecked
    | SlabsLacking
)  # fmt: skip
