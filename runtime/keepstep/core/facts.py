"""What a node knows of itself: its lease, its worker, its slabs, its store, and what befalls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from keepstep.core.events import Head, SlabSeal
from keepstep.core.failures import Charges
from keepstep.core.fingerprints import Fingerprint
from keepstep.core.gpu_events import GpuSample, KeptCordon
from keepstep.core.launch.parameter_server import Role
from keepstep.core.preflight_records import PreflightRecord
from keepstep.core.profiles import Straggler
from keepstep.core.splits import Part, Split, Window
from keepstep.core.stalls import Activity, Stall
from keepstep.core.values import frozen


@frozen
class Lease:
    """The right to act until `deadline`, counted from the sending of the last keepalive that was answered."""

    lease: int
    deadline: float


@frozen
class Worker:
    """One process of this host, from the order to start it until its exit was reported.

    Attributes:
        loops: it joined as a loop of the script's own, whose data may be keepstep's.
        activity: what it was last known to be about; `sign_at`: when it last showed that it gets on.
        looked_at: when it was last looked at because it did not; `stall` is what was found.
        slow_s: what the slowest of its recent steps took.
        divides: its script takes its batches from `run.dataset`.
        windows: of each of its ranks the steps that are being added up; `splits` are the newest whole windows.
        fingerprint: of the newest step that was to be looked at.
    """

    worker_id: str
    generation: int
    rank: int
    started_at: float
    greeted: bool = False
    joined: bool = False
    loops: bool = False
    restored: bool = False
    entered: int = 0
    completed: int = 0
    step_s: float = 0.0
    snapshot_s: float = 0.0
    stopping: bool = False
    signalled_at: float | None = None
    stepped: bool = False
    standby: str = ""
    activity: Activity = Activity.START
    sign_at: float = 0.0
    looked_at: float = 0.0
    stall: Stall | None = None
    slow_s: float = 0.0
    divides: bool = False
    windows: tuple[Window, ...] = ()
    splits: tuple[Split, ...] = ()
    fingerprint: Fingerprint | None = None


@frozen
class Track:
    """What the leader has seen of one rank's windows in this generation.

    Attributes:
        step: where the newest window ended.
        slow: windows in which it was slow, less those since in which it was well.
        well: windows in a row in which it was well, since it was found to be a straggler.
        since: the step at which the first slow one ended.
        costs: by part, seconds by which it was longer than the peers', over so many windows as `slow` says.
        best_s: its least own work in a window.
        at: when the newest window was looked at, unix seconds; `lost_s`: what all have waited for it in slow ones.
    """

    step: int = 0
    slow: int = 0
    well: int = 0
    since: int = 0
    costs: Mapping[Part, float] = field(default_factory=dict)
    best_s: float = 0.0
    at: float = 0.0
    lost_s: float = 0.0
    found: Straggler | None = None


@frozen
class Server:
    """One process of this host that serves the chief of another, or of this one.

    Attributes:
        role: `ps` or `worker`, with its `number` among those of the role.
        ended: its script has come to its end by itself: it is not replaced.
    """

    server_id: str
    generation: int
    rank: int
    role: Role
    number: int
    stopping: bool = False
    ended: bool = False


@frozen
class Replacement:
    """A server was replaced at `at`, unix seconds, by a rule that may have a budget of its own."""

    generation: int
    at: float
    rule: str


@frozen
class Standby:
    """A process that waits to become a worker; `is_ready` once its imports are behind it."""

    standby_id: str
    is_ready: bool = False


@frozen
class Standbys:
    """What is known of this host's standbys.

    Attributes:
        waiting: those that there are, oldest first.
        starts: how many were ever started.
        falls: how many were of no use since one was.
        again_at: not before then.
        modules: what workers were seen to import.
        restarted: whether a worker was started since there were any.
    """

    waiting: tuple[Standby, ...] = ()
    starts: int = 0
    falls: int = 0
    again_at: float = 0.0
    modules: tuple[str, ...] = ()
    restarted: bool = False


@frozen
class Slab:
    """One slab of this host. `seal` is None while it is free or being written; `digest` is set once verified.

    `busy` is the operation that reads it; of an upload and a verification at the same time the one that began first.
    """

    slab: int
    size_bytes: int
    seal: SlabSeal | None = None
    digest: str = ""
    busy: str = ""


@frozen
class Interruption:
    """The platform takes this host away at `deadline`."""

    source: str
    noticed_at: float
    deadline: float


@frozen
class Recovery:
    """When the phases of the recovery under way were reached, seconds on the node's clock; 0 where not yet."""

    fault_at: float = 0.0
    learnt_at: float = 0.0
    stopped_at: float = 0.0
    ready_at: float = 0.0
    joined_at: float = 0.0
    restored_at: float = 0.0


@frozen
class Preflight:
    """What is known of the checks before hosts train.

    Attributes:
        seen: the newest plan, since `seen_at` on this node's clock.
        ran: the newest plan for which this host was looked at; `found` is what came of it.
        judged: the newest plan that this node, as the leader, has come to a verdict about.
        stale: hosts that have to be checked again, since they were lost or cordoned.
        unsure: nodes have come or gone, so it is to be seen who wants checking.
        barred: hosts that are to be cordoned, and why.
        code, text: the job is to end so; 0 where it is not.
    """

    seen: int = 0
    seen_at: float = 0.0
    ran: int = 0
    found: PreflightRecord | None = None
    judged: int = 0
    stale: tuple[str, ...] = ()
    unsure: bool = True
    barred: tuple[tuple[str, str], ...] = ()
    code: int = 0
    text: str = ""


@frozen
class FilesView:
    """What is known of the checkpoints that the script writes by itself.

    Attributes:
        edition: the newest one of which there is a copy.
        kept: the newest one that this node committed, in generation `kept_in`; its `manifest`, the commit's `number`.
        settled: up to which mark the folder was gone over: twice the worker's number, and one more where it had ended.
        put_back: the newest generation for which the folder was put right.
        heard: a worker of this node said how it was doing.
    """

    edition: int = 0
    kept: int = 0
    manifest: str = ""
    number: int = 0
    kept_in: int = 0
    settled: int = 0
    put_back: int = 0
    heard: bool = False


@frozen
class StoreView:
    """What is known of the store. `head_known` is False until HEAD was read for the generation that is forming.

    `files` is the manifest of the newest committed checkpoint of the script's own files, empty where there is none, and
    `files_generation` the newest that claimed their HEAD. `saves` has the seconds of this node's last commits, uploads
    included, and `distrusted` are the manifests that are left out since worlds died of their states.
    """

    head: Head | None = None
    files: str = ""
    files_generation: int = 0
    head_known: bool = False
    head_asked_at: float = 0.0
    available: bool = True
    refused: str = ""
    corrupt: tuple[str, ...] = ()
    distrusted: tuple[str, ...] = ()
    failing_since: float | None = None
    last_commit_at: float = 0.0
    saves: tuple[float, ...] = ()
    fenced: int = 0
    """The newest generation whose commit was refused, since HEAD carries a newer one."""
    told_interval_s: float = 0.0
    """The interval between checkpoints that was told last, where it is keepstep's."""
    saving_since: float | None = None
    """When this host began to upload what is not committed yet."""
    told_committable: bool | None = None
    """Whether an interruption would leave the time for a save, as it was told last."""
    charges: Charges | None = None
    """What the store has of them; None where that was neither read nor written by this node."""


@frozen
class Growth:
    """A counter has grown by `count` since it was first read, `at` unix seconds for the last time."""

    count: int
    at: float


@frozen
class GpuView:
    """What is known of one GPU.

    Attributes:
        sample: what it told last.
        links_down: how many NVLinks were not active at first: those are none that it has lost.
        hot: on so many readings in a row it was hotter than it may be.
        grown: the counters that have grown, by name.
    """

    sample: GpuSample
    links_down: int = 0
    hot: int = 0
    grown: Mapping[str, Growth] = field(default_factory=dict)


@frozen
class GpuFault:
    """Why a GPU is not to be trained on: known by `key`, in words for people, seen first `at` unix seconds."""

    gpu: str
    key: str
    text: str
    at: float


@frozen
class Gpus:
    """What is known of this host's GPUs.

    Attributes:
        seen: each by its UUID.
        silent: the driver does not answer.
        faults: why this host is not to train, until its cordon is lifted.
        forgiven: faults that it had when that was done, by their keys: until they are over, and come back.
        listed: the store's list of cordons, as it was at the start.
        asked: what the list was to say of this host when that was last asked for; `kept`: what it does say.
        lifted: what it is to say no more.
    """

    seen: Mapping[str, GpuView] = field(default_factory=dict)
    silent: bool = False
    faults: tuple[GpuFault, ...] = ()
    forgiven: tuple[str, ...] = ()
    listed: tuple[KeptCordon, ...] = ()
    asked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    lifted: tuple[str, ...] = ()
