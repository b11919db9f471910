"""What one event costs a node of a job of 8, 64 and 512 hosts: deciding, and the digest that its journal keeps.

A real state is folded from real records, then each kind of event is given to it many times, the sizes in turn. The last
line of the output is one JSON object. README.md beside this file says how to read it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from keepstep.core import events as e
from keepstep.core.codec import Digests, encode_event
from keepstep.core.decide import decide, initial_state
from keepstep.core.job import JobSpec, first_etcd_hosts
from keepstep.core.policy import Policy
from keepstep.core.records import (
    AckRecord,
    GenerationRecord,
    LeaderRecord,
    Member,
    NodeRecord,
    Phase,
    Record,
    Standing,
    StatusRecord,
    StoredObject,
    UploadRecord,
)
from keepstep.core.state import State

SIZES = (8, 64, 512)
ROUNDS, EVENTS = 30, 40
RATIO_MAX = 1.5
LEASE = 7


class Node:
    """One node of a job that trains, or whose next generation forms: the leader, or else the last host."""

    def __init__(self, hosts: int, *, leads: bool, forms: bool = False) -> None:
        self.names = tuple(f"algo-{n}" for n in range(1, hosts + 1))
        self.name = self.names[0 if leads else -1]
        job = JobSpec(
            name="job", host=self.name, hosts=self.names, node_id=self.name, boot=0, address="10.0.0.1",
            port_base=20000, run="run", strategy="multi_worker", python="python", script="train.py", arguments=(),
            has_store=True, etcd_hosts=first_etcd_hosts(self.names),
        )  # fmt: skip
        self.now, self.revision, self.count = 1_000.0, 10, 0
        self.digests = Digests()
        self.state: State = initial_state(job, Policy(), self.now)
        self.generation = GenerationRecord(
            number=1, phase=Phase.FORMING if forms else Phase.READY, leader=self.names[0], run="run", snapshot_every=8,
            members=tuple(Member(name, name, "10.0.0.1", 20000) for name in self.names), save_step=0 if forms else 4096,
        )  # fmt: skip
        self.gives(e.AgentStarted((), (), 0))
        self.gives(e.LeaseGranted(LEASE, self.now + 5.0))
        self.gives(self._read(leads, forms))
        if not forms:
            self.worker = self.state.workers[0].worker_id
            self.gives(e.WorkerStarted(self.worker, 100))
            self.gives(e.WorkerJoined(self.worker, "loop"))

    def _read(self, leads: bool, forms: bool) -> e.ClusterRead:
        known = self.names if leads else [self.name]
        records: list[Record] = [NodeRecord(name, name, "10.0.0.1", LEASE, 0) for name in known]
        records += [LeaderRecord(self.names[0], self.names[0], LEASE), self.generation]
        if leads and not forms:
            records += [StatusRecord(name, name, 1, Standing.RUNNING) for name in self.names]
        return e.ClusterRead(tuple((record, self._revision()) for record in records), whole=leads)

    def _revision(self) -> int:
        self.revision += 1
        return self.revision

    def gives(self, event: e.Event) -> float:
        """Give the node an event; returns the seconds it took to decide and to digest the turn."""
        self.now += 0.0005
        begun = time.perf_counter()
        decision = decide(self.state, event, self.now)
        self.digests.of(encode_event(event), self.now, decision)
        taken = time.perf_counter() - begun
        self.state = decision.state
        return taken

    def _other(self) -> str:
        self.count += 1
        return self.names[self.count * 7 % (len(self.names) - 1) + (0 if self.name == self.names[-1] else 1)]

    def lease(self) -> e.Event:
        return e.LeaseRenewed(LEASE, self.now + 5.0)

    def timer(self) -> e.Event:
        return e.TimerFired()

    def steps(self) -> e.Event:
        self.count += 1
        return e.StepsSampled(self.worker, self.count, self.count, 0.05, 0.0001)

    def node(self) -> e.Event:
        name = self._other()
        return e.RecordSeen(NodeRecord(name, name, "10.0.0.1", self.count, 0), self._revision())

    def status(self) -> e.Event:
        name = self._other()
        return e.RecordSeen(StatusRecord(name, name, 1, Standing.RUNNING, step=self.count), self._revision())

    def upload(self) -> e.Event:
        objects = (StoredObject(f"o{self.count}", "replicated", 0, 0, 1, "0"),)
        return e.RecordSeen(UploadRecord(1, 4096, self._other(), "d", objects), self._revision())

    def ack(self) -> e.Event:
        name = self._other()
        return e.RecordSeen(AckRecord(1, name, name, self.count), self._revision())


KINDS: dict[str, tuple[bool, bool, Callable[[Node], e.Event]]] = {
    "leader: lease renewed": (True, False, Node.lease),
    "leader: own steps sampled": (True, False, Node.steps),
    "leader: timer": (True, False, Node.timer),
    "leader: a node's record": (True, False, Node.node),
    "leader: a member's status": (True, False, Node.status),
    "leader: a member's upload": (True, False, Node.upload),
    "leader: a member's acknowledgement": (True, True, Node.ack),
    "member: lease renewed": (False, False, Node.lease),
    "member: own steps sampled": (False, False, Node.steps),
    "member: timer": (False, False, Node.timer),
}


def main() -> int:
    costs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, (leads, forms, make) in KINDS.items():
        nodes = {size: Node(size, leads=leads, forms=forms) for size in SIZES}
        for _ in range(ROUNDS):
            for size, node in nodes.items():
                taken = [node.gives(make(node)) for _ in range(EVENTS)]
                costs[kind][size].append(statistics.median(taken))
    print(f"{'microseconds for one event':40}" + "".join(f"{size:>8}" for size in SIZES) + "   512 : 8")
    ratios, medians = {}, {}
    for kind, by_size in costs.items():
        medians[kind] = {size: statistics.median(found) * 1e6 for size, found in by_size.items()}
        pairs = zip(by_size[SIZES[-1]], by_size[SIZES[0]], strict=True)
        ratios[kind] = statistics.median(large / small for large, small in pairs)
        shown = "".join(f"{medians[kind][size]:8.0f}" for size in SIZES)
        print(f"{kind:40}{shown}{ratios[kind]:10.2f}")
    worst = max(ratios.values())
    print(json.dumps({
        "name": "fold", "value": round(worst, 3), "goal": f"<= {RATIO_MAX}: cost of one event at 512 hosts : at 8",
        "ok": worst <= RATIO_MAX, "ratios": {kind: round(ratio, 3) for kind, ratio in ratios.items()},
        "us": {kind: {str(size): round(us, 1) for size, us in found.items()} for kind, found in medians.items()},
        "events": ROUNDS * EVENTS, "load_average": os.getloadavg()[0],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
