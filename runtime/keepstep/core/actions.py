"""What hands are asked to do. Imperative; immutable.

An action with an `operation` is answered by an event that carries the same operation; until then it is in flight and is
not asked for again. An action without one cannot fail in a way that the core could act upon.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from keepstep.core.records import Record, StoredObject


class Measure(StrEnum):
    """What is counted or observed; each is one Prometheus metric."""

    RESTART = "restart"
    RECOVERY = "recovery"
    LOST_STEPS = "lost_steps"
    GENERATION = "generation"
    DURABLE_STEP = "durable_step"
    COMMIT_S = "commit_s"
    CHECKPOINT_INTERVAL_S = "checkpoint_interval_s"
    COMMITTABLE = "committable"
    STORE_AVAILABLE = "store_available"


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Ask for a lease and keep renewing it until it is lost or revoked."""

    operation: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """Give the lease back, and with it every record bound to it."""

    lease: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a record if its key still has revision `expect` (0: is absent, -1: whatever it has).

    `guard` is the revision that the leader's key must have, 0 for none: who is not leader any more writes nothing.
    """

    operation: str
    record: Record
    expect: int
    lease: int
    guard: int = 0


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process; `environment` is added to what the user's script gets anyway.

    `standby` names the process that is to become this worker; where it is gone, or empty, a new one is started.
    """

    worker_id: str
    generation: int
    rank: int
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    standby: str = ""


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a process that serves the job's chief; `title` is what its output is marked with."""

    server_id: str
    title: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StartStandby:
    """Start a process that makes a worker's large imports and waits; `command` is a worker's without its script."""

    standby_id: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopWorker:
    """SIGKILL to the process group: the state is in the slab."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Forward a signal to the worker's process group."""

    worker_id: str
    signal: int


@dataclass(frozen=True, slots=True)
class WriteOrders:
    """Publish in the control page what the worker is to do."""

    generation: int
    hold: bool
    drain_step: int
    grant: int
    snapshot_every: int
    restore_slab: int
    restore_step: int


@dataclass(frozen=True, slots=True)
class SampleEntered:
    """Read the step that a held worker has entered."""

    operation: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class SamplePulse:
    """Look at what a worker is about, and for how long it has shown no sign."""

    operation: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class CollectStacks:
    """Find out what a worker that stands still is doing, and keep the stacks of its threads with the job's output."""

    operation: str
    worker_id: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class AllocateSlabs:
    """Make slabs of this size, have init keep them, and hand them to the worker."""

    slabs: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HandSlabs:
    """Hand existing slabs to the worker."""

    worker_id: str
    layout: int
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSlabs:
    """Forget slabs and give their memory back."""

    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClearSeal:
    """Declare a slab's content void: its step was never part of the world that goes on."""

    slab: int


@dataclass(frozen=True, slots=True)
class VerifySlab:
    operation: str
    slab: int
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UploadSnapshot:
    """Upload this rank's share of a sealed snapshot."""

    operation: str
    slab: int
    step: int
    size_bytes: int
    generation: int
    run: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Claim HEAD for the generation, write the manifest if absent, and swap HEAD."""

    operation: str
    generation: int
    step: int
    run: str
    digest: str
    world_size: int
    objects: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class CompareReplicas:
    """Count a divergence, and find out which hosts hold which tensors otherwise than most do.

    `shares` are the hosts of the world in rank order, with the digests that differ.
    """

    generation: int
    step: int
    run: str
    shares: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReadHead:
    """Read HEAD, leaving out manifests that were found corrupt.

    `claim` is the generation that is to have it from now on, 0 for none: one that is older commits nothing any more. It
    is not taken from a newer one. `files`: the one of the script's own files, too.
    """

    operation: str
    without: tuple[str, ...]
    claim: int = 0
    run: str = ""
    files: bool = False


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Bring a committed checkpoint into a slab of its own, verified.

    `peers` may hold it in memory and are asked before the store: host, address, port.
    """

    operation: str
    manifest: str
    slab: int
    rank: int
    world_size: int
    peers: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KeepFiles:
    """Upload an edition of the script's own files and commit it for a generation."""

    operation: str
    edition: int
    generation: int
    run: str


@dataclass(frozen=True, slots=True)
class SettleFiles:
    """Go over the script's folder now, and copy what is new and whole."""

    operation: str
    mark: int


@dataclass(frozen=True, slots=True)
class PutBackFiles:
    """Have the script's folder hold what a manifest says (empty: none), and nothing newer or torn.

    What is newer and whole stays where the folder is the script's `own` and nobody else's has to be like it.
    """

    operation: str
    generation: int
    manifest: str
    own: bool


@dataclass(frozen=True, slots=True)
class SweepStore:
    """Delete what retention lets go."""


@dataclass(frozen=True, slots=True)
class Report:
    """One measurement."""

    measure: Measure
    value: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """Write the failure file; cause and hint come first, since the platform shows 1,024 characters."""

    text: str


@dataclass(frozen=True, slots=True)
class WatchAll:
    """Read and watch what members say of themselves, too; a ClusterRead that is whole is the answer."""

    operation: str


@dataclass(frozen=True, slots=True)
class ForgetRecords:
    """Delete the records whose keys begin with `prefix`: nobody needs them any more. What fails is left."""

    prefix: str


@dataclass(frozen=True, slots=True)
class JoinEtcd:
    """Start an etcd member here, for the one that was on the host `leaving`; `hosts` are all from then on."""

    operation: str
    leaving: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UseEtcd:
    """Ask the etcd on these hosts from now on."""

    hosts: tuple[str, ...]


Action = (
    GrantLease | RevokeLease | Put | StartWorker | StopWorker | SignalWorker | WriteOrders | SampleEntered
    | AllocateSlabs | HandSlabs | DropSlabs | ClearSeal | VerifySlab | UploadSnapshot | CommitCheckpoint | ReadHead
    | FetchSnapshot | SweepStore | Report | WriteFailure | ForgetRecords | JoinEtcd | UseEtcd
    | WatchAll | CompareReplicas | KeepFiles | SettleFiles | PutBackFiles | StartStandby
    | SamplePulse | CollectStacks | StartServer
)  # fmt: skip
