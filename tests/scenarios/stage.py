"""One real node, `algo-1`, on a stage: every action it asks for is answered at once, and a peer mirrors what it does.

A command of a transcript is a method of `Stage`; values are words. What the node thought about each event is one line:
`now event -> reasons => actions`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.decide import decide, initial_state
from keepstep.core.failures import Charges
from keepstep.core.job import JobSpec, first_etcd_hosts
from keepstep.core.records import LEASED, OF_NODES_KEYS, GenerationRecord, Member, Phase, StoredObject
from keepstep.core.state import Decision
from keepstep.intake.policy import load_policy
from tests.scenarios.checked import Checked
from tests.scenarios.operated import Operated
from tests.scenarios.peer import Peer
from tests.scenarios.telling import tell_turn

START = 1_000.0
LEASE_S = 5.0


class Stage(Checked, Operated):
    """A node, what it is surrounded by, and what is out of order there."""

    def __init__(
        self, hosts: int = 2, store: bool = True, knobs: tuple[str, ...] = (), peer: str = "algo-2", feeder: str = ""
    ) -> None:
        more = tuple(f"algo-{n}" for n in range(3, hosts + 1))
        names = tuple(sorted(("algo-1", peer))) + more if hosts > 1 else ("algo-1",)
        names = (*(name for name in names if name != feeder), *filter(None, [feeder]))
        policy = load_policy("default", ("health.preflight=off", *knobs))
        strategy = "multi_worker" if policy.launch.strategy == "auto" else policy.launch.strategy
        job = JobSpec(
            name="job", host="algo-1", hosts=names, node_id="one", boot=0, address="10.0.0.1", port_base=20000,
            run="run1", strategy=strategy, python="python", script="train.py", arguments=(), has_store=store,
            etcd_hosts=first_etcd_hosts(names), feeders=tuple(filter(None, [feeder])), machine="boot",
            watch="/checkpoints" if any(knob.startswith("checkpoint.watch=") for knob in knobs) else "",
        )  # fmt: skip
        super().__init__()
        self.now = START
        self.state = initial_state(job, policy, self.now)
        self.lines: list[str] = []
        self.records: dict[str, tuple[object, int]] = {}
        self.revision = self.leases = self.seals = 0
        self.head: e.Head | None = None
        self.edition, self.files, self.charges = 0, "", Charges()
        self.upload_s = 0.5
        self.worker = ""
        self.entered = 0
        self.watches_all = False
        self.page: dict[int, e.SlabSeal] = {}
        self.out_of_order: set[str] = set()
        self.peer = Peer(self, peer) if hosts > 1 else None
        self._inbox: deque[e.Event] = deque()
        self._under_way: deque[a.FetchSnapshot] = deque()

    # --- the fold ----------------------------------------------------------------------------------------------------

    def happens(self, event: e.Event) -> None:
        """The node thinks about an event, then about the answers to what it asked for."""
        self._inbox.append(event)
        while self._inbox and self.state.exit_code is None:
            event = self._inbox.popleft()
            decision = decide(self.state, event, self.now)
            self.state = decision.state
            self.lines.append(tell_turn(self.now - START, event, decision))
            self.after(event, decision)
            for action in decision.actions:
                self._answer(action)
            if self.peer is not None:
                self.peer.react()

    def after(self, event: e.Event, decision: Decision) -> None:
        """For whoever wants to know of each turn."""

    def post(self, event: e.Event) -> None:
        self._inbox.append(event)

    def write(self, record: object) -> int:
        """A record as etcd keeps it; returns its revision."""
        self.revision += 1
        self.records[record.key] = (record, self.revision)
        return self.revision

    def vanish(self, key: str) -> None:
        if self.records.pop(key, None) is not None:
            self.revision += 1
            if self.watches(key):
                self.post(e.RecordGone(key, self.revision))

    def watches(self, key: str) -> bool:
        """Whether the node's watch tells of this key."""
        return self.watches_all or not key.startswith(OF_NODES_KEYS)

    def _read(self) -> e.ClusterRead:
        found = tuple(each for key, each in self.records.items() if self.watches(key))
        return e.ClusterRead(found, self.watches_all)

    def _answer(self, action: a.Action) -> None:
        match action:
            case a.GrantLease() if "coordinator" in self.out_of_order:
                self.post(e.OperationFailed(action.operation, "no answer", 3600.0))
            case a.GrantLease():
                self.leases += 1
                self.post(e.LeaseGranted(self.leases, self.now + LEASE_S))
            case a.Put():
                self._put(action)
            case a.StartWorker():
                self.worker = action.worker_id
            case a.StopWorker() if action.worker_id != self.worker:
                self.post(e.WorkerExited(action.worker_id, self.now, signal=9))
            case a.StopWorker() if not self.stuck:
                self.post(self._exit(signal=9, frozen=self.thaw()))
            case a.ClearSeal():
                self.page.pop(action.slab, None)
            case a.DropSlabs():
                for slab in action.slabs:
                    self.page.pop(slab, None)
            case a.SampleEntered():
                self.post(e.EnteredSampled(action.operation, action.worker_id, self.entered))
            case a.SamplePulse() | a.CollectStacks() | a.CheckHost() | a.ProfileWorker():
                self.post(self.look(action))
            case a.WatchAll():
                self.watches_all = True
                self.post(self._read())
            case a.JoinEtcd():
                self.post(e.EtcdJoined(action.operation))
            case _:
                self._answer_from_store(action)

    def _put(self, action: a.Put) -> None:
        _, revision = self.records.get(action.record.key, (None, 0))
        if "coordinator" in self.out_of_order:
            self.post(e.OperationFailed(action.operation, "no answer", 3600.0))
        elif action.expect not in (-1, revision):
            self.post(e.PutRefused(action.operation))
        else:
            self.post(e.RecordPut(action.operation, action.record, self.write(action.record)))

    def _answer_from_store(self, action: a.Action) -> None:
        operation = getattr(action, "operation", "")
        remote = isinstance(action, a.UploadSnapshot | a.CommitCheckpoint | a.ReadHead | a.FetchSnapshot | a.KeepFiles)
        if remote and "store" in self.out_of_order:
            self.post(e.OperationFailed(operation, "no route to the store", 1.0))
        elif remote and "permission" in self.out_of_order:
            self.post(e.StoreRefused(operation, "access denied"))
        else:
            self._answer_well(action)

    def _answer_well(self, action: a.Action) -> None:
        match action:
            case a.VerifySlab() if f"slab {action.slab}" in self.out_of_order:
                self.post(e.SnapshotBad(action.operation, action.slab, action.step, "checksum"))
            case a.VerifySlab():
                self.post(e.SnapshotVerified(action.operation, action.slab, action.step, f"d{action.step}"))
            case a.UploadSnapshot() if "uploads" not in self.out_of_order:
                item = StoredObject(f"o{action.step}.{action.rank}", "replicated", action.rank, 0, 1, "0")
                done = e.SnapshotUploaded(
                    action.operation, action.generation, action.step, f"d{action.step}", (item,), self.upload_s
                )
                self.post(done)
            case a.CompareReplicas():
                self.post(e.ReplicasCompared(action.generation, action.step, (("algo-2", "replicated/w"),)))
            case a.CommitCheckpoint() if "fence" in self.out_of_order:
                self.post(e.CommitRefused(action.operation, action.generation, action.step))
            case a.CommitCheckpoint():
                self.head = e.Head(action.generation, action.step, action.digest, f"manifests/{action.step}")
                done = e.CheckpointCommitted(action.operation, action.generation, action.step, self.head.manifest, 0.2)
                self.post(done)
            case a.ReadHead() if "head read" not in self.out_of_order:
                head = self.head
                if "head" in self.out_of_order:
                    self.head = head = e.Head(9, 0, "", "")
                if action.claim and head is not None:
                    head = self.head = replace(head, generation=max(head.generation, action.claim))
                if head is not None and head.manifest in action.without:
                    head = replace(head, step=10, digest="d10", manifest="manifests/10")
                files = "files/0" if self.files in action.without else self.files
                charges = None if action.claim else self.charges
                self.post(e.HeadRead(action.operation, head, files, charges=charges))
            case a.SettleFiles():
                self.post(e.FilesSettled(action.operation, action.mark, self.edition))
            case a.KeepFiles() if "fence" in self.out_of_order:
                self.post(e.CommitRefused(action.operation, action.generation, 0))
            case a.KeepFiles():
                self.files = f"files/{action.edition}"
                self.post(e.FilesKept(action.operation, action.edition, self.files, action.edition, 100, 0.1))
            case a.PutBackFiles() if "folder" in self.out_of_order:
                self.post(e.FilesStuck(action.operation, "no space left on device"))
            case a.PutBackFiles() if f"checkpoint {action.manifest}" in self.out_of_order:
                self.post(e.CheckpointCorrupt(action.operation, action.manifest, "checksum"))
            case a.PutBackFiles():
                self.post(e.FilesPutBack(action.operation, action.generation, self.edition, 1, 0))
            case a.FetchSnapshot() if "checkpoint" in self.out_of_order and not action.manifest.endswith("/10"):
                self.post(e.CheckpointCorrupt(action.operation, action.manifest, "checksum"))
            case a.FetchSnapshot() if "transfer" in self.out_of_order:
                self._under_way.append(action)
            case a.FetchSnapshot():
                self.post(self._fetched(action))
            case a.KeepCordons():
                self.post(e.CordonsKept(action.operation))
            case a.KeepCharges():
                self.charges = action.charges
                self.post(e.ChargesKept(action.operation, action.charges))

    def _fetched(self, action: a.FetchSnapshot) -> e.Event:
        seal = self._seal(action.slab, int(action.manifest.rpartition("/")[2]))
        return e.SnapshotFetched(action.operation, seal, f"d{seal.step}")

    # --- commands ----------------------------------------------------------------------------------------------------

    def starts(self, *slabs: str) -> None:
        """The agent starts; `0@16` is a slab that a former agent left, sealed at step 16."""
        kept = [(int(number), int(step)) for number, _, step in (text.partition("@") for text in slabs)]
        seals = tuple(self._seal(slab, step) for slab, step in kept)
        self.happens(e.AgentStarted(tuple((slab, 100) for slab, _ in kept), seals))
        self.happens(self._read())

    def waits(self, seconds: str) -> None:
        """Time passes; the lease is renewed meanwhile."""
        self.now += float(seconds)
        if self.state.lease is not None:
            self.state = replace(self.state, lease=replace(self.state.lease, deadline=self.now + LEASE_S))
        self.happens(e.TimerFired())

    def freezes(self, seconds: str) -> None:
        """Time passes, and nothing is renewed."""
        self.now += float(seconds)
        for key, (record, _) in list(self.records.items()):
            mine = getattr(record, "host", "") == "algo-1"
            if mine and isinstance(record, LEASED):
                self.vanish(key)
        self.happens(e.TimerFired())

    def breaks(self, *what: str) -> None:
        """store, permission, coordinator, fence, checkpoint, `slab 0`; `head read` and uploads, which never end."""
        self.out_of_order.add(" ".join(what))

    def uploads_take(self, seconds: str) -> None:
        """From now on an upload is said to have taken so long."""
        self.upload_s = float(seconds)

    def heals(self, *what: str) -> None:
        self.out_of_order.discard(" ".join(what))

    def transfer_ends(self, how: str = "") -> None:
        """The oldest transfer that is under way comes to its end; `late`: a worker runs already."""
        action = self._under_way.popleft()
        self.happens(e.SnapshotUnwanted(action.operation) if how == "late" else self._fetched(action))

    def joins(self, how: str = "fit") -> None:
        """The worker enters `fit`, or a `loop` of its own, gets its slabs and restores."""
        step = self.state.restore[1] if self.state.restore is not None else 0
        self.entered = step + 1
        self.happens(e.WorkerStarted(self.worker, 4711))
        self.happens(e.WorkerHello(self.worker))
        self.happens(e.WorkerJoined(self.worker, how))
        self.happens(e.LayoutAnnounced(self.worker, 1, 100))
        self.happens(e.WorkerRestored(self.worker, step, 0.1))

    def imports(self, *modules: str) -> None:
        """The worker's script imports what takes long."""
        for module in modules:
            self.happens(e.WorkerImported(self.worker, module))

    def standby(self, how: str, number: str, detail: str = "exit code 1", retry_s: str = "0") -> None:
        """The node's standby of that number is `ready`, or `gone`."""
        standby_id = f"one.standby.{number}"
        gone = e.StandbyGone(standby_id, detail, float(retry_s))
        self.happens(e.StandbyReady(standby_id) if how == "ready" else gone)

    def grows(self, size_bytes: str, room_bytes: str | None = None) -> None:
        """The worker's state has become larger, on a host that has so much memory left."""
        room = None if room_bytes is None else int(room_bytes)
        self.happens(e.LayoutAnnounced(self.worker, 2, int(size_bytes), room))

    def steps(self, step: str, snapshot_s: str = "0.001") -> None:
        """The worker completes a step and seals it in the slab it was granted."""
        self.now += 0.5
        if self.state.lease is not None:
            self.state = replace(self.state, lease=replace(self.state.lease, deadline=self.now + LEASE_S))
        number = int(step)
        self.entered = number + 1
        if not self.state.workers[0].stepped:
            self.happens(e.FirstStepCompleted(self.worker, number, self.now))
        self.happens(e.StepsSampled(self.worker, number + 1, number, 0.5, float(snapshot_s)))
        orders = self.state.orders
        if orders is not None and orders.grant >= 0:
            self.happens(e.SnapshotSealed(self.worker, self._seal(orders.grant, number), float(snapshot_s)))

    def writes(self, edition: str) -> None:
        """The script has written a checkpoint of its own, and it was copied whole."""
        self.edition = int(edition)
        self.happens(e.FilesCopied(self.edition, (f"ckpt-{edition}",)))

    def writes_unseen(self, edition: str) -> None:
        """The script has written one in its last moments: whoever looks finds it."""
        self.edition = int(edition)

    def dies(self, signal: str = "9") -> None:
        self.happens(self._exit(signal=int(signal)))

    def server_dies(self, number: str, why: str = "") -> None:
        """A process that serves the chief is killed, or runs `out_of_memory`."""
        self.happens(e.WorkerExited(f"one.s{number}", self.now, signal=9, out_of_memory=why == "out_of_memory"))

    def server_ends(self, number: str) -> None:
        """Its script comes to an end by itself."""
        self.happens(e.WorkerExited(f"one.s{number}", self.now, exit_code=0))

    def raises(self, error_type: str = "ValueError", kind: str = "") -> None:
        """The script ends by an exception; `victim` where TensorFlow says that it follows from another one's death."""
        error = e.FirstError(error_type, "bad batch", self.now - 0.1, self.entered, kind == "victim")
        self.happens(self._exit(exit_code=1, error=error))

    def runs_out_of_memory(self) -> None:
        self.happens(self._exit(signal=9, out_of_memory=True))

    def exits(self, code: str = "0") -> None:
        self.happens(self._exit(exit_code=int(code)))

    def ghost(self) -> None:
        """A message of a worker that is gone already."""
        self.happens(e.WorkerHello("one.99"))

    def interrupted(self, grace_s: str = "110") -> None:
        self.happens(e.InterruptionNoticed("sigterm", self.now + float(grace_s)))

    def peer_(self, what: str, *values: str) -> None:
        """Something happens on the other host; see `peer.Peer`."""
        assert self.peer is not None
        getattr(self.peer, what)(*values)
        while self._inbox and self.state.exit_code is None:
            self.happens(self._inbox.popleft())

    def repeats(self, key: str) -> None:
        """The watch tells again what it told before."""
        record, revision = self.records[key]
        self.happens(e.RecordSeen(record, revision))

    def recalls(self, number: str) -> None:
        """An older generation turns up at a newer revision, as after a restore of etcd's data."""
        generation = self.records["generation"][0]
        self.happens(e.RecordSeen(replace(generation, number=int(number)), self.revision + 1))

    def files_kept(self, manifest: str) -> None:
        """An earlier run left these files."""
        self.files = manifest

    def runs(self) -> None:
        """The worker runs and says nothing."""
        self.happens(e.WorkerStarted(self.worker, 4711))
        self.happens(e.WorkerHello(self.worker))

    def committed(self, step: str) -> None:
        """An earlier run left this checkpoint."""
        self.head = e.Head(7, int(step), f"d{step}", f"manifests/{step}")

    def job_ended(self) -> None:
        """The generation that trains has ended well, and the agent has not heard of it."""
        generation = self.records["generation"][0]
        self.write(replace(generation, phase=Phase.ENDED, exit_code=0, verdict="done"))

    def restarts_agent(self, seen_generation: str) -> None:
        """The agent died and is back, with what init kept of it."""
        job, self.watches_all = replace(self.state.job, node_id="one-again", boot=1), False
        self.state = initial_state(job, self.state.policy, self.now)
        self.happens(e.AgentStarted((), (), int(seen_generation)))
        self.happens(self._read())

    def earlier_run_ended(self) -> None:
        members = (Member("algo-1", "long ago"), Member("algo-2", "long ago, too"))
        self.write(GenerationRecord(6, Phase.ENDED, "long ago", members, exit_code=143, verdict="interrupted"))

    def trains(self, step: str = "8", how: str = "fit") -> None:
        """From power-on to a world of which `step` is completed and sealed."""
        self.starts()
        if self.peer is not None:
            self.peer_("arrives")
        self.joins(how)
        self.steps(step)

    def _exit(self, **how: object) -> e.WorkerExited:
        seals = tuple(self.page.values())
        entered, completed = self.entered, self.state.completed
        event = e.WorkerExited(self.worker, self.now, entered=entered, completed=completed, seals=seals)
        return replace(event, **how)

    def _seal(self, slab: int, step: int) -> e.SlabSeal:
        self.seals += 1
        self.page[slab] = e.SlabSeal(slab, step, self.seals, 100)
        return self.page[slab]
