"""What nodes tell each other: the values under `/keepstep/<job>/` in the coordinator.

Every record knows its own key. All are immutable; a change is a new record put over the old one by compare-and-swap.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Literal, NamedTuple

from keepstep.core.failures import Failure as Failure
from keepstep.core.failures import LedgerEntry as LedgerEntry
from keepstep.core.fingerprints import Fingerprint, Repeat
from keepstep.core.preflight_records import PreflightPlan, PreflightRecord
from keepstep.core.profiles import Profile
from keepstep.core.splits import Split
from keepstep.core.stalls import Stall
from keepstep.core.values import frozen


class Phase(StrEnum):
    """Where a generation stands."""

    FORMING = "forming"
    """Members stop what is older and acknowledge."""
    READY = "ready"
    """Ranks and the resume step are fixed, and by the generation's number the ports; members train."""
    ENDED = "ended"
    """The job is over; members leave."""


class Standing(StrEnum):
    """Where one host's worker stands within a generation."""

    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"
    SERVING = "serving"
    """It trains nothing itself, and is there for the one that does."""
    LEFT = "left"


@frozen
class Held:
    """A snapshot that a host holds sealed and verified: completed step, digest of the replicated state."""

    step: int
    digest: str


@frozen
class NodeRecord:
    """A node that is there; bound to its lease, and naming it.

    After a lapse the record must be put anew, since the old one vanishes with the old lease although it reads the same.
    `seen_generation` is the newest generation that the node knows of: an etcd that lost its data must not make numbers
    repeat. Its workers' ports begin at `port_base`. At `peer_port` the node gives others what is in its slabs; 0: it
    does not. A node that is `fresh` has run nothing yet and holds nothing: it need not be asked to stop anything.
    """

    host: str
    node_id: str
    address: str
    lease: int
    seen_generation: int = 0
    port_base: int = 0
    peer_port: int = 0
    fresh: bool = False
    kind: Literal["node"] = "node"

    @property
    def key(self) -> str:
        return f"alive/{self.host}"


@frozen
class LeaderRecord:
    """The node that proposes; bound to its lease, and naming it."""

    host: str
    node_id: str
    lease: int = 0
    key: str = "leader"
    kind: Literal["leader"] = "leader"


class Member(NamedTuple):
    """One member of a generation, and where it is reached: what its node said of itself when it was chosen.

    A tuple, and so a list in JSON: of hundreds of members every node reads all, and names would be most of it.
    """

    host: str
    node_id: str
    address: str = ""
    port_base: int = 0
    peer_port: int = 0


@frozen
class Resume:
    """The one state that all members of a generation start from. `manifest` is empty where slabs hold it."""

    step: int
    digest: str
    manifest: str = ""


EQUAL_WEIGHT = 1000
"""A host's weight where nobody is slow."""


@frozen
class GenerationRecord:
    """The world: who is in it, where it starts from, where it is to stop.

    Attributes:
        number: the fencing number; grows by one with each rendezvous.
        members: in rank order.
        failures: what happened since the last generation that trained; decides between restart and stop.
        lost_steps: steps that this generation executes again.
        snapshot_every: steps between snapshots.
        drain_step: the last step to execute; 0 while none is agreed.
        save_step: the step whose snapshot every member is to upload; 0 for none.
        durable_step: newest step committed to the store.
        save_s: seconds that a save takes, 0 where none was measured yet.
        ledger: failures within the budget's window.
        failed_at: when the training began or had the failure before the newest ones, and those, unix seconds.
        restarts: restarts of this job, planned ones left out.
        skipped: steps whose batch is left out, since it was fatal again and again.
        falls: the state that the last worlds began with, once for each of them that died before it completed a step.
        distrusted: states that are not to be gone on from, since worlds died of them at once.
        run: nonce of the run, part of object names in the store.
        root: the failure that came first.
        together: all who were left have stopped their workers once the job had ended: everybody may leave.
        feeders: who runs tf.data's service for the members, the dispatcher's host first; they are no members.
        leaving: nodes that are no members any more and may still run something: they have to stop it first.
        settled: the newest generation that was ready, and so may have commits under way; 0 for none.
        files: manifest of the script's own files that all members put back; empty for none.
        pause: why all workers are to stop at one agreed step, for a new generation to go on from there; empty: no need.
        served: the orders that this generation or an earlier one has carried out.
        weights: by host, how large a part of a global batch it takes, where the parts are not equal; 1000 for others.
        weighed_at: when they were last changed, unix seconds: to bring the slowest rank's data and computing from
            `weighed_from_s` seconds a step to `weighed_to_s`.
        profile: who is to be looked at by what slows it down, and beside whom; the newest wish of this generation.
        repeat: the step that is done again on other hosts, and how that stands.
        exit_code: set when the job has ended; `verdict`: why, for people.
    """

    number: int
    phase: Phase
    leader: str
    members: tuple[Member, ...]
    failures: tuple[Failure, ...] = ()
    resume: Resume | None = None
    lost_steps: int = 0
    snapshot_every: int = 0
    drain_step: int = 0
    save_step: int = 0
    durable_step: int = 0
    save_s: float = 0.0
    ledger: tuple[LedgerEntry, ...] = ()
    failed_at: tuple[float, ...] = ()
    restarts: int = 0
    skipped: tuple[int, ...] = ()
    falls: tuple[Resume, ...] = ()
    distrusted: tuple[Resume, ...] = ()
    run: str = ""
    pause: str = ""
    served: tuple[str, ...] = ()
    exit_code: int | None = None
    verdict: str = ""
    root: Failure | None = None
    leaving: tuple[Member, ...] = ()
    feeders: tuple[Member, ...] = ()
    together: bool = False
    settled: int = 0
    files: str = ""
    weights: tuple[tuple[str, int], ...] = ()
    weighed_at: float = 0.0
    weighed_from_s: float = 0.0
    weighed_to_s: float = 0.0
    profile: Profile | None = None
    repeat: Repeat = field(default_factory=Repeat)
    key: str = "generation"
    kind: Literal["generation"] = "generation"

    def has(self, node_id: str) -> bool:
        """Whether this incarnation of a node is a member."""
        return any(member.node_id == node_id for member in self.members)

    def asks(self, node_id: str) -> bool:
        """Whether this incarnation of a node is to acknowledge the generation while it forms."""
        return any(member.node_id == node_id for member in (*self.members, *self.leaving))

    def feeds(self, host: str) -> int:
        """The host's place among those that run tf.data's service, -1 for one that does not."""
        return next((place for place, feeder in enumerate(self.feeders) if feeder.host == host), -1)

    def weight_of(self, host: str) -> int:
        """How large a part of a global batch a host takes beside the others."""
        return dict(self.weights).get(host, EQUAL_WEIGHT)

    def rank_of(self, host: str) -> int:
        """The host's rank, -1 for a host that is not a member."""
        return next((rank for rank, member in enumerate(self.members) if member.host == host), -1)


@frozen
class AckRecord:
    """A member has no worker of an older generation left, and says what it holds; bound to its lease.

    `completed` is the newest step its worker completed; `corrupt` names manifests that did not read back; `files` is
    the newest manifest of the script's own files that it committed as rank 0 of the last world.
    """

    generation: int
    host: str
    node_id: str
    completed: int = 0
    held: tuple[Held, ...] = ()
    failure: Failure | None = None
    corrupt: tuple[str, ...] = ()
    files: str = ""
    kind: Literal["ack"] = "ack"

    @property
    def key(self) -> str:
        return f"acks/{self.generation}/{self.host}"


@frozen
class StatusRecord:
    """How a member is doing within a generation; bound to its lease.

    Attributes:
        entered: the step its worker has entered, answered once `hold` is set; -1 before.
        step: newest completed step, refreshed every other second.
        sealed: newest step that is sealed in a slab.
        snapshot_cost_ratio: time of the last snapshot over the time of a step, 0 where unknown.
        stall: its worker does not get on; None while it does.
        strains: what slows its host down, in words.
        splits: where the time of the newest steps went, of each of its ranks.
        divides: its script takes its batches from `run.dataset`, so that their sizes can be changed.
        fingerprint: of the step that the generation wants looked at, once it is done.
        joined: its worker has come to its training.
        saves: there is memory for snapshots.
    """

    host: str
    node_id: str
    generation: int
    standing: Standing
    failure: Failure | None = None
    entered: int = -1
    step: int = 0
    sealed: int = 0
    snapshot_cost_ratio: float = 0.0
    stall: Stall | None = None
    strains: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    divides: bool = False
    fingerprint: Fingerprint | None = None
    joined: bool = False
    saves: bool = True
    kind: Literal["status"] = "status"

    @property
    def key(self) -> str:
        return f"status/{self.host}"


@frozen
class StoredObject:
    """One object of a checkpoint in the store; `offset` is its place within the replicated region."""

    key: str
    kind: str
    rank: int
    offset: int
    size_bytes: int
    crc32c: str


@frozen
class UploadRecord:
    """A member's share of a checkpoint lies in the store, after so many `seconds`."""

    generation: int
    step: int
    host: str
    digest: str
    objects: tuple[StoredObject, ...]
    seconds: float = 0.0
    kind: Literal["upload"] = "upload"

    @property
    def key(self) -> str:
        return f"uploads/{self.generation}/{self.step}/{self.host}"


@frozen
class RequestRecord:
    """A wish addressed to the leader: the platform takes `host` away at `deadline` (unix seconds). Bound to a lease."""

    host: str
    source: str
    at: float
    deadline: float
    kind: Literal["request"] = "request"

    @property
    def key(self) -> str:
        return f"requests/{self.host}"


@frozen
class OrderRecord:
    """An operator's order to stop at one agreed step and start anew from there; carried out once. Bound to a lease."""

    order_id: str
    by: str
    at: float
    kind: Literal["order"] = "order"

    @property
    def key(self) -> str:
        return f"orders/{self.order_id}"


@frozen
class CordonRecord:
    """A host that is to take no part, until the record is gone."""

    host: str
    by: str
    at: float
    why: str = ""
    kind: Literal["cordon"] = "cordon"

    @property
    def key(self) -> str:
        return f"cordons/{self.host}"


@frozen
class EtcdRecord:
    """The hosts that keep the job's etcd.

    `joining` is to take the place of `leaving`, whose host is lost; both are empty while nothing changes.
    """

    hosts: tuple[str, ...]
    joining: str = ""
    leaving: str = ""
    key: str = "etcd"
    kind: Literal["etcd"] = "etcd"


Record = (
    NodeRecord | LeaderRecord | GenerationRecord | AckRecord | StatusRecord | UploadRecord | RequestRecord
    | OrderRecord | CordonRecord | EtcdRecord | PreflightPlan | PreflightRecord
)  # fmt: skip

OF_NODES_KEYS = ("acks/", "alive/", "checks/", "status/", "uploads/")
"""How the keys begin of what nodes say of themselves: only leaders watch them."""

NOT_OF_NODES = ("co", "s")
"""Between these all other keys lie, in byte order."""

LEASED = (NodeRecord, LeaderRecord, AckRecord, StatusRecord, RequestRecord, OrderRecord)
"""Records that vanish with the lease of who wrote them."""
