"""What a node knows of itself: its lease, its worker, its slabs, its store, and what befalls it."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.events import Head, SlabSeal
from keepstep.core.launch.parameter_server import Role
from keepstep.core.stalls import Activity, Stall


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to act until `deadline`, counted from the sending of the last keepalive that was answered."""

    lease: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of this host, from the order to start it until its exit was reported.

    Attributes:
        loops: it joined as a loop of the script's own, whose data may be keepstep's.
        activity: what it was last known to be about; `sign_at`: when it last showed that it gets on.
        looked_at: when it was last looked at because it did not; `stall` is what was found.
        slow_s: what the slowest of its recent steps took.
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Replacement:
    """A server was replaced at `at`, unix seconds, by a rule that may have a budget of its own."""

    generation: int
    at: float
    rule: str


@dataclass(frozen=True, slots=True)
class Standby:
    """A process that waits to become a worker; `is_ready` once its imports are behind it."""

    standby_id: str
    is_ready: bool = False


@dataclass(frozen=True, slots=True)
class Standbys:
    """What is known of this host's standbys.

    Attributes:
        waiting: those that there are, oldest first.
        starts: how many were ever started.
        falls: how many were of no use since one was.
        again_at: not before then.
        modules: what workers were seen to import.
    """

    waiting: tuple[Standby, ...] = ()
    starts: int = 0
    falls: int = 0
    again_at: float = 0.0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab of this host. `seal` is None while it is free or being written; `digest` is set once verified."""

    slab: int
    size_bytes: int
    seal: SlabSeal | None = None
    digest: str = ""
    busy: str = ""


@dataclass(frozen=True, slots=True)
class Interruption:
    """The platform takes this host away at `deadline`."""

    source: str
    noticed_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """When the phases of the recovery under way were reached, seconds on the node's clock; 0 where not yet."""

    fault_at: float = 0.0
    learnt_at: float = 0.0
    stopped_at: float = 0.0
    ready_at: float = 0.0
    joined_at: float = 0.0
    restored_at: float = 0.0


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    available: bool = True
    refused: str = ""
    corrupt: tuple[str, ...] = ()
    distrusted: tuple[str, ...] = ()
    failing_since: float | None = None
    last_commit_at: float = 0.0
    saves: tuple[float, ...] = ()
    fenced: int = 0
    """The newest generation whose commit was refused, since HEAD carries a newer one."""
