"""What a node knows, and the turn in which it thinks.

State holds facts. Moods ("recovering", "draining") are derived from them wherever they are needed, never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from keepstep.core.actions import Action, Put, RevokeLease, StopWorker, WriteFailure, WriteOrders
from keepstep.core.facts import (
    FilesView,
    Gpus,
    Interruption,
    Lease,
    Preflight,
    Recovery,
    Replacement,
    Server,
    Slab,
    Standbys,
    StoreView,
    Track,
    Worker,
)
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, Phase, Record, UploadRecord
from keepstep.core.values import copy_of, evolve, frozen
from keepstep.core.view import OF_NODES, Cluster, known_revision


@frozen
class State:
    """Everything one node knows.

    Attributes:
        replaced: servers that were replaced within their generation; `serves` counts all that were started.
        spawned: the newest generation for which a worker was started here.
        done: the generation whose worker exited with 0 here.
        failure: what went wrong here in `failure_generation`.
        flight: operations that were asked for, and when each may be asked for again (NEVER: on its answer).
        former_generation: the newest generation that a former agent of this host took part in or saw, 0 for none.
        last_generation: the newest generation ever seen, kept when the coordinator lost its data.
        uploaded: this host's share of the checkpoint being saved, until its record is put.
        alone: the whole of what this host holds, uploaded since it can not reach the others any more.
        absent: the job's hosts that have no node, and since when: what leaders see, since they have watched.
        sighted: the job's hosts that have one, and since when, likewise.
        witnessed: nonce of the run that was seen going on, whether or not this host took part.
        paused_at: when this generation's pause was asked for.
        etcd_used: the hosts whose etcd is asked.
        trained_rank: the rank whose local state is in the slabs, -1 where that is not known.
        restore: slab and step that the running worker restores from.
        slab_bytes: what the newest layout needs; `layout` is its number.
        saves: there is memory for snapshots of it.
        held_at: since when the worker is held at a step boundary; `entered` is what it answered, -1 before.
        short_since: since when this node lacks a lease, or hosts are missing.
        orders: the last orders published, to see whether they must change.
        tracks: by rank, what the leader has seen of its steps in generation `tracked`; it last looked at `judged_at`.
        profiled: the newest profile of this host's worker that was begun: generation, number.
        strains: what slows this host down, in words, by who noticed.
        gpus: what is known of its GPUs.
        leaving_at: when this node began to wait for the others at the exit barrier; `together_at`: when it heard that
            they had all come.
    """

    job: JobSpec
    policy: Policy
    started_at: float
    lease: Lease | None = None
    cluster: Cluster = field(default_factory=Cluster)
    workers: tuple[Worker, ...] = ()
    servers: tuple[Server, ...] = ()
    replaced: tuple[Replacement, ...] = ()
    serves: int = 0
    standbys: Standbys = field(default_factory=Standbys)
    slabs: tuple[Slab, ...] = ()
    next_slab: int = 0
    spawns: int = 0
    spawned: int = 0
    done: int = 0
    completed: int = 0
    failure: Failure | None = None
    failure_generation: int = 0
    seen_generation: int = 0
    former_generation: int = 0
    store: StoreView = field(default_factory=StoreView)
    files: FilesView = field(default_factory=FilesView)
    flight: Mapping[str, float] = field(default_factory=dict)
    orders: WriteOrders | None = None
    held_at: float | None = None
    entered: int = -1
    status_at: float = 0.0
    last_generation: GenerationRecord | None = None
    uploaded: UploadRecord | None = None
    alone: UploadRecord | None = None
    absent: Mapping[str, float] = field(default_factory=dict)
    sighted: Mapping[str, float] = field(default_factory=dict)
    witnessed: str = ""
    paused_at: float | None = None
    etcd_used: tuple[str, ...] = ()
    trained_rank: int = -1
    restore: tuple[int, int] | None = None
    slab_bytes: int = 0
    layout: int = 0
    saves: bool = True
    ready_at: float = 0.0
    short_since: float | None = None
    interruption: Interruption | None = None
    recovery: Recovery | None = None
    leaving_at: float | None = None
    together_at: float | None = None
    tracks: Mapping[str, Track] = field(default_factory=dict)
    tracked: int = 0
    judged_at: float = 0.0
    profiled: tuple[int, int] = (0, 0)
    strains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=Gpus)
    preflight: Preflight = field(default_factory=Preflight)
    exit_code: int | None = None
    wake_at: float | None = None


@frozen
class Note:
    """One reason of a turn, with what it was about."""

    reason: Reason
    detail: str = ""


@frozen
class Decision:
    """The answer to one event: the state from now on, what to do in order, and why (at least one note)."""

    state: State
    actions: tuple[Action, ...]
    notes: tuple[Note, ...]


NEVER = 1e18
"""Later than any time; finite, so that a state is plain JSON."""


class Turn:
    """One event being thought through: the state so far, the actions and reasons collected, the earliest wake-up.

    `state` is a copy of the state that came in; it changes in place until the turn is closed.
    """

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now = copy_of(state), now
        self.actions: list[Action] = []
        self.notes: list[Note] = []
        self._wake_at: float | None = None

    def set(self, **changes: Any) -> None:
        """Replace fields of the state."""
        for name, changed in changes.items():
            object.__setattr__(self.state, name, changed)

    def set_cluster(self, **changes: Any) -> None:
        """Replace fields of the cluster view."""
        self.set(cluster=evolve(self.state.cluster, **changes))

    def set_store(self, **changes: Any) -> None:
        """Replace fields of the store view."""
        self.set(store=evolve(self.state.store, **changes))

    def set_worker(self, worker_id: str, **changes: Any) -> None:
        """Replace fields of one worker."""
        self.set(workers=tuple(evolve(w, **changes) if w.worker_id == worker_id else w for w in self.state.workers))

    @property
    def processes(self) -> list[str]:
        """The ids of all that runs here for the job."""
        serving = [server.server_id for server in self.state.servers if not server.ended]
        return [*(worker.worker_id for worker in self.state.workers), *serving]

    def set_slab(self, slab: int, **changes: Any) -> None:
        """Replace fields of one slab."""
        self.set(slabs=tuple(evolve(s, **changes) if s.slab == slab else s for s in self.state.slabs))

    def because(self, reason: Reason, detail: str = "") -> None:
        """Add a reason."""
        self.notes.append(Note(reason, detail))

    def do(self, action: Action, reason: Reason | None = None, detail: str = "") -> None:
        """Ask for an action that needs no answer."""
        self.actions.append(action)
        if reason is not None:
            self.because(reason, detail)

    def attempt(self, action: Any, reason: Reason, detail: str = "") -> bool:
        """Ask for an action that will be answered, unless it is in flight already or may not be tried again yet."""
        again_at = self.state.flight.get(action.operation)
        if again_at is not None:
            if again_at > self.now:
                if again_at != NEVER:
                    self.wake(again_at)
                return False
        self.set(flight={**self.state.flight, action.operation: NEVER})
        self.do(action, reason, detail)
        return True

    def landed(self, operation: str, again_at: float | None = None) -> None:
        """An operation was answered; `again_at` keeps it from being tried again before then."""
        flight = {key: at for key, at in self.state.flight.items() if key != operation}
        if again_at is not None:
            flight[operation] = again_at
        self.set(flight=flight)

    def in_flight(self, operation: str) -> bool:
        return self.state.flight.get(operation) == NEVER

    def leave(self, code: int, text: str, reason: Reason, hint: str = "") -> None:
        """Stop everything here and exit; what went wrong, and what can be done, goes to the failure file."""
        for process_id in self.processes:
            self.do(StopWorker(process_id))
        if code:
            self.do(WriteFailure(f"{text}\nhint: {hint}" if hint else text))
        if self.state.lease is not None:
            self.do(RevokeLease(self.state.lease.lease))
        self.set(exit_code=int(code))
        self.because(reason, text)

    def wake(self, at: float) -> None:
        """Ask to be woken at `at` at the latest."""
        if at != NEVER and (self._wake_at is None or at < self._wake_at):
            self._wake_at = at

    def decision(self) -> Decision:
        """Close the turn."""
        self.set(wake_at=self._wake_at)
        notes = tuple(self.notes) or (Note(Reason.NOTHING_TO_DO),)
        return Decision(self.state, tuple(self.actions), notes)

    # --- what is asked again and again -------------------------------------------------------------------------------

    @property
    def generation(self) -> GenerationRecord | None:
        """The newest generation, whoever its members are."""
        seen = self.state.cluster.generation
        return None if seen is None else seen.record

    @property
    def leads(self) -> bool:
        """Whether this node holds the leader's key under a lease that still stands."""
        leader, lease = self.state.cluster.leader, self.state.lease
        if leader is None or lease is None or leader.record.lease != lease.lease:
            return False  # a key that is bound to an older lease goes with that
        return leader.record.node_id == self.state.job.node_id and self.has_lease

    @property
    def has_lease(self) -> bool:
        return self.state.lease is not None and self.now < self.state.lease.deadline

    @property
    def interrupted(self) -> bool:
        """Whether the platform takes this host, or another one of the job, away."""
        return self.state.interruption is not None or bool(self.state.cluster.requests)

    @property
    def is_member(self) -> bool:
        job = self.state.job
        return self.state.cluster.members.get(job.host) == job.node_id

    @property
    def is_over(self) -> bool:
        """Whether this host's job has ended: it saw it go on, or came back with the memory of an agent that did."""
        generation, former = self.generation, self.state.former_generation
        if generation is None or generation.phase is not Phase.ENDED:
            return False
        if self.state.witnessed and generation.run == self.state.witnessed:
            return True
        came_back = former and generation.number >= former and generation.rank_of(self.state.job.host) >= 0
        return self.is_member or bool(came_back)

    def put(self, record: Record, reason: Reason, detail: str = "") -> bool:
        """Write a record over what is known of its key, under this node's lease (and, for the leader's, its guard)."""
        lease = self.state.lease
        if lease is None or not self.has_lease:
            return False
        known = -1 if isinstance(record, OF_NODES) else known_revision(self.state.cluster, record)
        leader = self.state.cluster.leader
        guard = leader.revision if isinstance(record, GenerationRecord) and leader is not None else 0
        return self.attempt(Put(f"put:{record.key}", record, known, lease.lease, guard), reason, detail)
