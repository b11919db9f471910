"""What hands are asked to do. Imperative; immutable.

An action with an `operation` is answered by an event that carries the same operation; until then it is in flight and is
not asked for again. An action without one cannot fail in a way that the core could act upon.
"""

from __future__ import annotations

from enum import StrEnum

from keepstep.core.failures import Charges
from keepstep.core.gpu_events import KeptCordon
from keepstep.core.preflight_events import CheckHost as CheckHost
from keepstep.core.profiles import Profile
from keepstep.core.records import Record, StoredObject
from keepstep.core.values import frozen


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
    STRAGGLER = "straggler"
    STRAGGLER_WAIT_S = "straggler_wait_s"
    SLOW_ONCE = "slow_once"
    PREFLIGHT_FLAW = "preflight_flaw"
    REPEAT = "repeat"


@frozen
class GrantLease:
    """Ask for a lease and keep renewing it until it is lost or revoked."""

    operation: str
    ttl_s: float


@frozen
class RevokeLease:
    """Give the lease back, and with it every record bound to it."""

    lease: int


@frozen
class Put:
    """Write a record if its key still has revision `expect` (0: is absent, -1: whatever it has).

    `guard` is the revision that the leader's key must have, 0 for none: who is not leader any more writes nothing.
    """

    operation: str
    record: Record
    expect: int
    lease: int
    guard: int = 0


@frozen
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


@frozen
class StartServer:
    """Start a process that serves the job's chief; `title` is what its output is marked with."""

    server_id: str
    title: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


@frozen
class StartStandby:
    """Start a process that makes a worker's large imports and waits; `command` is a worker's without its script."""

    standby_id: str
    command: tuple[str, ...]


@frozen
class StopWorker:
    """SIGKILL to the process group: the state is in the slab."""

    worker_id: str


@frozen
class SignalWorker:
    """Forward a signal to the worker's process group."""

    worker_id: str
    signal: int


@frozen
class WriteOrders:
    """Publish in the control page what the worker is to do."""

    generation: int
    hold: bool
    drain_step: int
    grant: int
    snapshot_every: int
    restore_slab: int
    restore_step: int
    fingerprint: int = 0


@frozen
class SampleEntered:
    """Read the step that a held worker has entered."""

    operation: str
    worker_id: str


@frozen
class SamplePulse:
    """Look at what a worker is about, and for how long it has shown no sign."""

    operation: str
    worker_id: str


@frozen
class CollectStacks:
    """Find out what a worker that stands still is doing, and keep the stacks of its threads with the job's output.

    It may be stopped meanwhile for `pause_s` seconds at the most: one that only waits must not be missed by the others.
    """

    operation: str
    worker_id: str
    generation: int
    rank: int
    pause_s: float


@frozen
class ProfileWorker:
    """Look at a rank of a worker that trains: a sample of its Python stacks, TensorFlow's profile of some steps."""

    operation: str
    worker_id: str
    generation: int
    host: str
    rank: int
    profile: Profile


@frozen
class AllocateSlabs:
    """Make slabs of this size, have init keep them, and hand them to the worker."""

    slabs: tuple[int, ...]
    size_bytes: int


@frozen
class HandSlabs:
    """Hand existing slabs to the worker."""

    worker_id: str
    layout: int
    slabs: tuple[int, ...]


@frozen
class DropSlabs:
    """Forget slabs and give their memory back."""

    slabs: tuple[int, ...]


@frozen
class ClearSeal:
    """Declare a slab's content void: its step was never part of the world that goes on."""

    slab: int


@frozen
class VerifySlab:
    operation: str
    slab: int
    step: int
    size_bytes: int


@frozen
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


@frozen
class CommitCheckpoint:
    """Claim HEAD for the generation, write the manifest if absent, and swap HEAD."""

    operation: str
    generation: int
    step: int
    run: str
    digest: str
    world_size: int
    objects: tuple[StoredObject, ...]


@frozen
class CompareReplicas:
    """Count a divergence, and find out which hosts hold which tensors otherwise than most do.

    `shares` are the hosts of the world in rank order, with the digests that differ.
    """

    generation: int
    step: int
    run: str
    shares: tuple[tuple[str, str], ...]


@frozen
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


@frozen
class FetchSnapshot:
    """Bring a committed checkpoint into a slab of its own, verified.

    Attributes:
        peers: those who may hold it in memory and are asked before the store: host, address, port.
        group: those who fetch it at the same time, this host at `place` among them, each of which reads a part of it
            for all; in the order that all of them know. Empty where there is nobody to share the reading with.
    """

    operation: str
    manifest: str
    slab: int
    rank: int
    world_size: int
    peers: tuple[tuple[str, str, int], ...] = ()
    group: tuple[tuple[str, str, int], ...] = ()
    place: int = 0


@frozen
class KeepFiles:
    """Upload an edition of the script's own files and commit it for a generation."""

    operation: str
    edition: int
    generation: int
    run: str


@frozen
class SettleFiles:
    """Go over the script's folder now, and copy what is new and whole."""

    operation: str
    mark: int


@frozen
class PutBackFiles:
    """Have the script's folder hold what a manifest says (empty: none), and nothing newer or torn.

    What is newer and whole stays where the folder is the script's `own` and nobody else's has to be like it.
    """

    operation: str
    generation: int
    manifest: str
    own: bool


@frozen
class KeepCordons:
    """Have the store's list of cordons say `cordons`, and nothing any more of what is in `lifted`."""

    operation: str
    cordons: tuple[KeptCordon, ...] = ()
    lifted: tuple[str, ...] = ()


@frozen
class KeepCharges:
    """Have the store say what the job was charged with so far."""

    operation: str
    charges: Charges


@frozen
class SweepStore:
    """Delete what retention lets go, unless HEAD carries a newer generation.

    `restoring` are manifests that hosts may be reading: those stay.
    """

    generation: int
    restoring: tuple[str, ...] = ()


@frozen
class Report:
    """One measurement."""

    measure: Measure
    value: float
    label: str = ""


@frozen
class WriteFailure:
    """Write the failure file; cause and hint come first, since the platform shows 1,024 characters."""

    text: str


@frozen
class WatchAll:
    """Read and watch what members say of themselves, too; a ClusterRead that is whole is the answer."""

    operation: str


@frozen
class ForgetRecords:
    """Delete the records whose keys begin with `prefix`: nobody needs them any more. What fails is left."""

    prefix: str


@frozen
class JoinEtcd:
    """Start an etcd member here, for the one that was on the host `leaving`; `hosts` are all from then on."""

    operation: str
    leaving: str
    hosts: tuple[str, ...]


@frozen
class UseEtcd:
    """Ask the etcd on these hosts from now on."""

    hosts: tuple[str, ...]


Action = (
    GrantLease | RevokeLease | Put | StartWorker | StopWorker | SignalWorker | WriteOrders | SampleEntered
    | AllocateSlabs | HandSlabs | DropSlabs | ClearSeal | VerifySlab | UploadSnapshot | CommitCheckpoint | ReadHead
    | FetchSnapshot | SweepStore | Report | WriteFailure | ForgetRecords | JoinEtcd | UseEtcd
    | WatchAll | CompareReplicas | KeepFiles | SettleFiles | PutBackFiles | StartStandby
    | SamplePulse | CollectStacks | ProfileWorker | StartServer | KeepCordons | CheckHost
    | KeepCharges
)  # fmt: skip
