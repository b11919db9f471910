"""What must hold in every world, whatever breaks: safety at each turn, liveness once the faults have stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core.causes import FailureCause
from keepstep.core.failures import Charges
from keepstep.core.records import GenerationRecord, Phase
from keepstep.errors import ExitCode
from keepstep.simulation.silent import STEPS_A_FILE

if TYPE_CHECKING:
    from keepstep.core.state import Decision
    from keepstep.simulation.host import SimHost
    from keepstep.simulation.run import World
    from keepstep.simulation.silent import SilentWorker
    from keepstep.simulation.worker import SimWorker

_OF_A_WORKER = (FailureCause.KILLED, FailureCause.USER_CODE, FailureCause.PEER, FailureCause.OUT_OF_MEMORY)


class Checkers:
    """Collects violations; each names the rule that broke."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[str] = []
        self._members: dict[tuple[str, int], tuple[object, ...]] = {}
        self._ready: set[tuple[str, int]] = set()
        self._resumed: dict[int, int] = {}
        self._files: dict[int, GenerationRecord] = {}
        self._newest_trained: dict[str, int] = {}
        self._newest_known: dict[str, int] = {}
        self._unplanned: dict[str, list[float]] = {}

    def violation(self, text: str) -> None:
        self.violations.append(f"t={self.world.clock.now - 1_000_000:.3f} {text}")

    def decided(self, host: SimHost, decision: Decision) -> None:
        """No action without a lease; no way back to an older generation; a planned stop costs nothing."""
        state = decision.state
        known = state.cluster.generation
        if known is not None and known.record.phase is not Phase.ENDED:
            newest = self._newest_known.get(state.job.node_id, 0)
            if known.record.number < newest:
                self.violation(f"{host.name} goes back from generation {newest} to {known.record.number}")
            self._newest_known[state.job.node_id] = known.record.number
        if state.exit_code == ExitCode.TOO_FEW_HOSTS:
            self.world.gives_up(host)
        for action in decision.actions:
            if isinstance(action, a.StartWorker | a.StartServer | a.Put):
                lease = state.lease
                if lease is None or host.now() >= lease.deadline:
                    self.violation(f"action without a lease on {host.name}: {type(action).__name__}")
            if isinstance(action, a.Put) and isinstance(action.record, GenerationRecord):
                old = known.record if known is not None else state.last_generation
                kept = state.store.charges if old is None else None
                self._proposed(action.record, kept or (Charges() if old is None else Charges(old.restarts, old.ledger)))

    def _proposed(self, record: GenerationRecord, before: Charges) -> None:
        """Args: before: what the job was charged with, by the generation before or by the store."""
        if len(record.ledger) > len(before.ledger) and record.root is None:
            self.violation(f"planned stop charged to the budget in generation {record.number}")
        if record.restarts > before.restarts and record.root is None:
            self.violation(f"planned stop counted as a restart in generation {record.number}")
        root = record.root
        if root is not None and root.cause is FailureCause.HANG:
            if not any(worker_id.startswith(f"{root.host}-") for worker_id in self.world.hung):
                self.violation(f"a hang on {root.host} in generation {record.number}, where nothing hangs")
        if root is not None and root.cause in _OF_A_WORKER:
            if all(abs(at - root.at) > 1.0 for at in self._unplanned.get(root.host, [])):
                self.violation(f"planned stop on {root.host} taken for a failure in generation {record.number}")

    def put(self, host: SimHost, record: GenerationRecord) -> None:
        """One membership per generation; no resume beyond what is sealed or committed."""
        if record.phase is Phase.ENDED:
            if record.exit_code == ExitCode.TOO_FEW_HOSTS and not self.world.interrupted:
                self.world.gives_up(host, record)
            return
        world = (record.run, record.number)
        members = self._members.setdefault(world, record.members)
        if members != record.members:
            self.violation(f"generation {record.number} has two memberships")
        if record.phase is Phase.READY and world not in self._ready:
            self._ready.add(world)
            self.world.check_ready(record)
            self._check_resume(record)
            self._check_files(record)

    def _check_files(self, record: GenerationRecord) -> None:
        """All go on from the newest files that were ever committed."""
        self._files[record.number] = record
        newest = self.world.store.newest_files
        if self.world.silent and record.files != newest and not self.world.store.down:
            self.violation(f"generation {record.number} goes on from {record.files or 'no files'}, {newest} is kept")

    def _check_resume(self, record: GenerationRecord) -> None:
        step = record.resume.step if record.resume is not None else 0
        self._resumed[record.number] = step
        store = self.world.store
        head = store.head_without(store.rotten)
        committed = head.step if head is not None else 0
        if step < committed and not (store.down or store.refuses):
            self.violation(f"generation {record.number} resumes from {step}, {committed} is committed")
        if record.resume is None:
            return
        if record.resume.manifest:
            if record.resume.manifest not in {each.manifest for each in store.committed}:
                self.violation(f"generation {record.number} resumes from {step}, which was never committed")
            return
        for member in record.members:
            shelf = self.world.hosts[member.host].shelf
            sound = {seal.step for seal in shelf.seals.values() if seal.sequence not in shelf.rotten | shelf.diverged}
            if step not in sound:
                self.violation(f"generation {record.number} resumes from {step}, which {member.host} does not hold")

    def started(self, host: SimHost, worker: SimWorker) -> None:
        """When a worker starts, no worker of an older generation is alive anywhere."""
        for other in self.world.hosts.values():
            alive = other.worker
            if alive is not None and alive.alive and alive.spec.generation < worker.spec.generation:
                self.violation(f"generation {worker.spec.generation} starts beside {alive.spec.generation}")

    def exited(self, host: SimHost, planned: bool) -> None:
        """A worker's process is gone; remember when, on the host's clock, unless its agent had ordered it."""
        if not planned:
            self._unplanned.setdefault(host.name, []).append(host.now())

    def restores(self, host: SimHost, orders: a.WriteOrders) -> None:
        """A worker is to restore what its slab holds."""
        seal = host.shelf.seals.get(orders.restore_slab)
        if seal is None or seal.step != orders.restore_step:
            self.violation(f"{host.name} is to restore step {orders.restore_step}, its slab holds {seal}")

    def goes_on(self, worker: SilentWorker) -> None:
        """A silent script finds what the generation's record names; a lone one may find what it wrote later."""
        record = self._files.get(worker.spec.generation)
        if record is None or not record.files:
            return
        agreed, found = self.world.store.file_of(record.files), worker.written
        if found < agreed or (found > agreed and len(record.members) > 1):
            self.violation(f"{worker.host.name} goes on from file {found}, generation {record.number} from {agreed}")

    def kept(self, host: SimHost, generation: int, number: int) -> None:
        """What is committed of a silent script's files never goes back."""
        before = self.world.store.files[:number]
        if before != sorted(before):
            self.violation(f"{host.name} keeps file {before[-1]} after {before[-2]} in generation {generation}")

    def overwrites(self, host: SimHost, slab: int) -> None:
        """The newest sealed snapshot stays whole while the next one is written."""
        newest = max(host.shelf.seals.values(), key=lambda seal: (seal.step, seal.sequence), default=None)
        if newest is not None and newest.slab == slab:
            self.violation(f"{host.name} overwrites its newest snapshot, step {newest.step}")

    def restored(self, worker: SimWorker, step: int) -> None:
        """Every rank of a generation starts from the same step."""
        wanted = self._resumed.get(worker.spec.generation)
        if wanted is not None and wanted != step:
            self.violation(f"generation {worker.spec.generation}: one rank restored {step}, agreed was {wanted}")

    def completed(self, worker: SimWorker, step: int) -> None:
        """At most one world trains: generations of completed steps never go back."""
        generation = self.world.coordinator.history[-1]
        newest = self._newest_trained.get(generation.run, 0)
        if worker.spec.generation < newest:
            self.violation(f"generation {worker.spec.generation} trains after {newest}")
        self._newest_trained[generation.run] = max(newest, worker.spec.generation)

    def lease_expired(self, lease: int) -> None:
        """Once others see a node's lease gone, none of its workers is left."""
        kept = self.world.coordinator.kept.values()
        for entry in [entry for entry in kept if entry.lease == lease and entry.record.key.startswith("alive/")]:
            host = self.world.hosts[entry.record.host]  # type: ignore[union-attr]
            if host.worker is not None and host.worker.alive:
                self.violation(f"lease of {host.name} expired while its worker lived")

    def unsaved(self) -> list[str]:
        """What a job that is done has not saved of its last step, or of the last file that its script wrote."""
        world, store = self.world, self.world.store
        if world.silent:
            last = world.last_step // STEPS_A_FILE
            return [] if store.files and store.files[-1] == last else [f"done, but files are {store.files}, not {last}"]
        done = store.head is not None and store.head.step == world.last_step
        return [] if done else [f"done, but HEAD is {store.head}"]

    def at_the_end(self) -> list[str]:
        """The job is done and saved, or was interrupted; nothing that was committed is lost."""
        found: list[str] = []
        # a fresh container that comes once the job has ended can not know how it ended
        hosts = [host for host in self.world.hosts.values() if not host.too_late]
        codes = {host.exit_code for host in hosts}
        fired = self.world.fired
        unsaved = fired["store_refuses"] or fired["replica_diverges"]
        if codes == {0} and not unsaved:
            found += self.unsaved()
        allowed: set[int | None] = {0}
        if self.world.interrupted:
            allowed |= {143, 75}
        if fired["host_lost_for_good"]:
            allowed |= {75, None}
        if fired["store_refuses"]:
            allowed |= {77, 75}
        if self.world.policy.health.preflight == "fail":
            allowed |= {75}
        if codes - allowed:
            found.append(f"exit codes {codes}, allowed were {allowed}")
        return found
