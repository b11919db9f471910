"""Some of a job's nodes in one process: each with its own supervisor, journal, coordinator, watch and lease.

Only the hands that would touch a machine are missing: a worker that is to start has started, one that is to stop has
exited. Started by `rendezvous.py`, with one JSON object a line in both directions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import Clock
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.adapters.journal import JournalWriter
from keepstep.app.coordination import Coordination
from keepstep.app.supervisor import Supervisor
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.records import Phase
from keepstep.core.state import State


def tell(**said: object) -> None:
    print(json.dumps({**said, "at": time.monotonic()}), flush=True)


class Node:
    """One participant: everything of an agent that takes part in a rendezvous."""

    def __init__(self, setting: dict[str, Any], host: str) -> None:
        self.host, self.setting = host, setting
        self.coordinator = EtcdCoordinator(setting["endpoints"])
        self.registered, self.ready = False, 0
        self.tasks: list[asyncio.Task[object]] = []

    def join(self) -> None:
        """Begin, as an agent does that has just started."""
        tell(what="joins", host=self.host)
        names = tuple(self.setting["hosts"])
        job = JobSpec(
            name=self.setting["job"], host=self.host, hosts=names, node_id=f"{self.host} of {self.setting['job']}",
            boot=0, address="127.0.0.1", port_base=20000, run="run", strategy="multi_worker", python="python",
            script="train.py", arguments=(), has_store=False,
        )  # fmt: skip
        policy = Policy.model_validate({"elastic": {"hosts": self.setting["limits"]}})
        clock = Clock()
        journal = JournalWriter(Path(self.setting["folder"]) / f"{self.host}.jsonl")
        self.supervisor = Supervisor(job, policy, clock, journal, lambda line: None)
        self.coordination = Coordination(self.coordinator, job.name, clock, self._post, lambda line: None)
        self.clock = clock
        self.supervisor.post(e.AgentStarted((), (), 0))
        self._spawn(self.coordination.watch())
        self._spawn(self.supervisor.run(self._perform, self._after))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        """An agent in which something fails that is no operating error ends, and so does what is measured here."""
        if not task.cancelled() and task.exception() is not None:
            tell(what="failed", host=self.host, error=repr(task.exception()))

    def _post(self, event: e.Event) -> None:
        leader = self.supervisor.state.cluster.leader
        if leader is not None and leader.record.host == self.host:
            for change in event.changes if isinstance(event, e.RecordsChanged) else (event,):
                if isinstance(change, e.RecordGone) and change.key.startswith("alive/"):
                    tell(what="gone", host=change.key.removeprefix("alive/"))
        self.supervisor.post(event)

    def _perform(self, action: a.Action) -> None:
        match action:
            case a.GrantLease():
                self._spawn(self.coordination.hold_lease(action))
            case a.Put():
                self._spawn(self.coordination.put(action))
            case a.WatchAll():
                self._spawn(self.coordination.watch_all())
            case a.ForgetRecords():
                self._spawn(self.coordination.forget(action))
            case a.StartWorker():
                tell(what="starts", host=self.host, generation=action.generation)
                self.supervisor.post(e.WorkerStarted(action.worker_id, 1))
            case a.StopWorker():
                self.supervisor.post(e.WorkerExited(action.worker_id, self.clock.now(), signal=9))

    def _after(self, state: State, _event: e.Event, _now: float) -> None:
        if not self.registered and self.host in state.cluster.nodes:
            self.registered = True
            tell(what="registered", host=self.host)
        seen, leader = state.cluster.generation, state.cluster.leader
        if leader is None or leader.record.host != self.host or seen is None or seen.record.phase is not Phase.READY:
            return
        if seen.record.number != self.ready:
            self.ready = seen.record.number
            tell(what="ready", generation=self.ready, host=self.host, size=len(seen.record.members))

    async def vanish(self) -> None:
        """The host is gone, and its lease with it, as if its time were over."""
        state = self.supervisor.state
        for task in self.tasks:
            task.cancel()
        if state.lease is not None:
            await self.coordinator.revoke(state.lease.lease)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    setting = json.loads(await lines.readline())
    nodes = {host: Node(setting, host) for host in setting["mine"]}
    tell(what="prepared")
    while line := await lines.readline():
        command = json.loads(line)
        for host in command.get("join", ()):
            nodes[host].join()
        for host in command.get("vanish", ()):
            await nodes[host].vanish()


if __name__ == "__main__":
    asyncio.run(serve())
