"""Stragglers and GPU faults among the many hosts of a job: whom the core finds, whom it accuses, what that costs.

What decides is the core itself. The first host, which leads, and every host that something lasting happens to have a
fold of their own, and are told what their sensors would tell; to fold all of a thousand hosts would take a thousand
times as long, so the others (`crowd`) say what a well host's fold would say.

What is assumed (`ASSUMPTIONS`) is made up, if plausible: this measures the judging, not a fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import NormalDist

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.decide import decide
from keepstep.core.gpu_events import GpuSample, GpusSampled
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.records import GenerationRecord, Phase, Record
from keepstep.core.splits import Part, Split
from keepstep.core.state import Decision, State
from keepstep.simulation.ailments import (
    CHRONIC,
    COMPUTE_S,
    DATA_S,
    FAULTS,
    OF_GPUS,
    REST_S,
    SCATTER,
    SCATTER_REST,
    SYNC_S,
    Ailment,
    Kind,
)
from keepstep.simulation.clockwork import Clockwork
from keepstep.simulation.crowd import START_S, Crowd
from keepstep.simulation.fakes import FakeCoordinator, FakeStore
from keepstep.simulation.health_host import (
    LASTS_S,
    HealthCheckers,
    HealthCoordinator,
    HealthHost,
    HealthWorker,
)
from keepstep.simulation.host import SimHost
from keepstep.simulation.ledger import Case, Ledger, figures, is_brief
from keepstep.simulation.run import World
from keepstep.simulation.worker import SimWorker

ORIGIN_S = 1_000_000.0
REPAIR_S = 600.0
_TOLD_LATE_S = 120.0
"""An alarm is about a spell if it comes while that lasts or so soon after."""

ASSUMPTIONS = (
    "a step is 12 ms of data, 360 ms of computing, 8 ms of rest and 40 ms of exchange; its computing scatters by 3 % "
    "(log-normal) from step to step and by 1 % from host to host, data and rest by 20 %",
    "in 1,000 host-hours: 2 hosts become stragglers for good (1.15 to 3 times, 3 of 10 by late data), 0.5 have their "
    "clocks held down (as slow), 0.45 a GPU fault, 2 a harmless Xid, 50 a neighbour for 2 to 10 s (1.3 to 2.5 times), "
    "0.5 are slow for a minute, 0.5 hold up one step by 5 to 60 s: far more than healthy fleets have",
    "the first host stays well; the coordinator and the store do, too; leases do not lapse; who is repaired stays well",
    f"a restart takes {START_S:.0f} s from the record to the first step; a job that ended for repair is back "
    f"after {REPAIR_S:.0f} s with that host replaced",
    "the leader and all hosts with something lasting run the whole fold; the others tell what a well host's would, "
    "the mean of a window's steps drawn as one",
)


@dataclass
class Scene:
    """What all runs of one job share; `stopwatch` tells seconds on the machine that simulates."""

    policy: Policy
    names: tuple[str, ...]
    cases: list[Case]
    ledger: Ledger
    stopwatch: Callable[[], float]
    store: FakeStore = field(default_factory=FakeStore)


class HealthWorld(World):
    """One run of the job, from `began_s` on."""

    def __init__(self, scene: Scene, began_s: float) -> None:
        super().__init__(0, scene.policy, 1, 10**9)
        names, cases = scene.names, scene.cases
        self.names, self.cases, self.ledger, self.store = names, cases, scene.ledger, scene.store
        self.stopwatch = scene.stopwatch
        self.clock.now = ORIGIN_S + began_s
        self.random = Random(f"run/{began_s}")
        self.silent, self.snapshot_s, self.watch_latency_s = False, 0.4, 0.05
        self.normal = NormalDist()
        self.checkers = HealthCheckers(self)
        self.coordinator.watchers.clear()
        self.etcd_hosts = names[:1]
        sick = {case.ailment.host for case in cases if not is_brief(case.ailment.kind)}
        self.hosts: dict[str, SimHost] = {
            name: HealthHost(self, name, Random(f"{began_s}/{name}"))
            for name in names
            if name == names[0] or name in sick
        }
        for host in self.hosts.values():
            host.skew_s = 0.0
        self.leader: HealthHost = self.hosts[names[0]]  # type: ignore[assignment]
        self.crowd = Crowd(self, [name for name in names if name not in self.hosts], Random(f"crowd/{began_s}"))
        self.coordinator.watchers.append(self._record_changed)
        self.members: dict[str, int] = {}
        self.active: dict[str, list[Case]] = {}
        self.stalls: list[Case] = []
        self.completed_step, self.step_now_s = 0, DATA_S + COMPUTE_S + REST_S + SYNC_S
        self.crowd_ready_at = 0.0
        self.ended: GenerationRecord | None = None
        self._train_s = 0.0
        self._with_fold = 0
        self._began_s = began_s
        self._spells: dict[str, float] = {}
        self._started: set[int] = set()

    def _coordinator(self, clock: Clockwork) -> FakeCoordinator:
        return HealthCoordinator(clock)

    def make_worker(self, host: SimHost, spec: a.StartWorker) -> SimWorker:
        return HealthWorker(host, spec, host.random)

    @property
    def now_s(self) -> float:
        """Seconds since the simulation began."""
        return self.clock.now - ORIGIN_S

    def play_until(self, end_s: float) -> None:
        """Run until the job ends, or until `end_s`; then book where the time went."""
        lease = self.coordinator.grant(LASTS_S)
        for record in self.crowd.nodes():
            self.coordinator.put(record, -1, lease, 0)
        for host in self.hosts.values():  # whoever comes first leads
            self.clock.after(0.0 if host is self.leader else self.random.uniform(1.0, 2.0), host.power_on)
        for case in self.cases:
            if not case.gone:
                self.clock.after(max(5.0, case.ailment.at_s - self._began_s), lambda c=case: self._strike(c))  # type: ignore[misc]
        self.crowd.tick()
        self.clock.run_until(ORIGIN_S + end_s, lambda: self.ended is not None or bool(self.checkers.violations))
        paid_s = self.now_s - self._began_s
        spares = self.policy.elastic.spares
        self.ledger.spare_host_s += paid_s * spares
        self.ledger.stopped_host_s += (paid_s - self._train_s) * (len(self.names) - spares)
        self.ledger.violations += self.checkers.violations

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _strike(self, case: Case) -> None:
        """It begins, or goes on in a new run of the job."""
        ailment = case.ailment
        if ailment.kind in OF_GPUS:
            self._tell_of_gpu(case)
        if ailment.kind in FAULTS or ailment.kind is Kind.HARMLESS_XID:
            case.began_at = self.now_s
            case.gone = ailment.kind is Kind.HARMLESS_XID
        elif ailment.kind is Kind.STALL:
            self.stalls.append(case)
        else:
            self.active.setdefault(ailment.host, []).append(case)
            if is_brief(ailment.kind):
                self.clock.after(ailment.lasts_s, lambda: self._passed(case))

    def _passed(self, case: Case) -> None:
        case.gone = True
        self.active[case.ailment.host].remove(case)
        self._spells[case.ailment.host] = self.now_s

    def gpu_of(self, name: str) -> str:
        """The UUID of a host's GPU; a repaired host has another one."""
        repaired = sum(case.gone for case in self.cases if case.ailment.host == name and case.ailment.kind in FAULTS)
        return f"GPU-{name}-{repaired}"

    def _tell_of_gpu(self, case: Case) -> None:
        ailment, host = case.ailment, self.hosts[case.ailment.host]
        poll_s = self.policy.health.gpu.poll
        sample = _sample(self.gpu_of(ailment.host), ailment)
        host.post(GpusSampled((sample,)), self.random.uniform(0.01, poll_s))
        if ailment.ends_worker:
            self.clock.after(
                self.random.uniform(0.01, poll_s), lambda: host.worker.killed(6) if host.worker is not None else None
            )

    # --- steps -------------------------------------------------------------------------------------------------------

    def at_barrier(self, worker: SimWorker, step: int) -> None:
        """As in any world; those of the crowd are there from a moment on that is known."""
        number = worker.spec.generation
        if number in self._broken:
            self._becomes_victim(worker)
            return
        waiting = [each for each in self._barriers.get((number, step), []) if each.alive]
        waiting.append(worker)
        self._barriers[number, step] = waiting
        if len(waiting) == self._with_fold:
            del self._barriers[number, step]
            self.clock.after(self.crowd_ready_at - self.clock.now, lambda: self._compute(waiting, step))

    def _compute(self, workers: list[SimWorker], step: int) -> None:
        """How long the step takes: as long as the slowest of all."""
        usual_s = without_s = whole_s = self.crowd.slowest_s()
        more = {name: [case for case in cases if case.ailment.more_s] for name, cases in self.active.items() if cases}
        for stall in self.stalls:
            more.setdefault(stall.ailment.host, []).append(stall)
            self._spells[stall.ailment.host] = self.now_s
        self.stalls = []
        own = {}
        for worker in workers:
            own[worker] = self._work(more.get(worker.host.name, []))
            whole_s = max(whole_s, own[worker].work_s)
        for name, cases in more.items():
            if name in self.members:
                brief_s = usual_s + sum(case.ailment.more_s for case in cases if case.ailment.kind not in CHRONIC)
                without_s, whole_s = max(without_s, brief_s), max(whole_s, brief_s)
                self._bear(name, cases, step)
        whole_s += SYNC_S
        self.step_now_s = whole_s
        for worker, split in own.items():
            assert isinstance(worker, HealthWorker)
            worker.newest = Split(step, 1, split.data_s, split.compute_s, whole_s - split.work_s, split.rest_s)
        spent = (usual_s + SYNC_S, without_s + SYNC_S, whole_s)
        self.clock.after(whole_s, lambda: self._account(workers, step, spent, more))

    def _work(self, cases: list[Case]) -> Split:
        draw = self.random.lognormvariate
        more = {part: sum(case.ailment.more_s for case in cases if case.ailment.part is part) for part in Part}
        return Split(
            0, 1, DATA_S * draw(0.0, SCATTER_REST) + more[Part.DATA],
            COMPUTE_S * draw(0.0, SCATTER) + more[Part.COMPUTE], 0.0,
            REST_S * draw(0.0, SCATTER_REST) + more[Part.REST],
        )  # fmt: skip

    def _bear(self, name: str, cases: list[Case], step: int) -> None:
        light = self.crowd.lights.get(name)
        for case in cases:
            if case.began_at is None:
                case.began_at, case.began_step = self.now_s, step
            if light is not None:
                part = case.ailment.part
                light.more_s[part] = light.more_s.get(part, 0.0) + case.ailment.more_s

    def _account(
        self, workers: list[SimWorker], step: int, spent: tuple[float, float, float], more: dict[str, list[Case]]
    ) -> None:
        """The step is done, if all are still there: book it."""
        if all(worker.alive for worker in workers):
            usual_s, without_s, whole_s = spent
            count = len(self.members)
            self.ledger.steps += 1
            self.ledger.trained_host_s += whole_s * count
            self.ledger.by_stragglers_host_s += (whole_s - without_s) * count
            self.ledger.by_noise_host_s += (without_s - usual_s) * count
            self._train_s += whole_s
            for name, cases in more.items():
                for case in cases if name in self.members else ():
                    case.worked_s += whole_s
            self.completed_step = step
            self.crowd.completed(step)
        self._complete(workers, step)

    def sealed_steps(self) -> list[int]:
        """What every member's slabs hold."""
        return sorted((seal.step for seal in self.leader.shelf.seals.values()), reverse=True)

    # --- what is seen ------------------------------------------------------------------------------------------------

    def decide(self, state: State, event: e.Event, now: float) -> Decision:
        begun = self.stopwatch()
        decision = decide(state, event, now)
        if state.job.host == self.names[0]:
            took_s, changes = self.stopwatch() - begun, getattr(event, "changes", ())
            judged = decision.state.judged_at != state.judged_at
            (self.ledger.judging_s if judged else self.ledger.other_s).append(took_s)
            self.ledger.statuses_max = max(self.ledger.statuses_max, len(changes))
        return decision

    def seen(self, host: SimHost, event: e.Event, decision: Decision) -> None:
        """Note what was found."""
        self.checkers.decided(host, decision)
        for note in decision.notes:
            if note.reason is Reason.NOTHING_TO_DO:
                continue
            self.ledger.reasons[note.reason.value] += 1
            if note.reason is Reason.STRAGGLER_FOUND:
                self._straggler_found(note.detail)
            elif note.reason is Reason.GPU_FAULT:
                self._fault_found(host.name, note.detail)

    def _straggler_found(self, text: str) -> None:
        name = text.split(" ", 1)[0]
        for case in self.cases:
            if case.ailment.host == name and case.ailment.kind in CHRONIC and case in self.active.get(name, ()):
                if case.found_at is None:
                    case.found_at, case.found_step = self.now_s, self.completed_step
                return
        spell = any(case.ailment.kind is Kind.SPELL for case in self.active.get(name, ()))
        if spell or self.now_s - self._spells.get(name, -1e9) < _TOLD_LATE_S:
            self.ledger.spells_told += 1
        else:
            self.ledger.false_alarms.append(f"{self.now_s:.0f} s: {text}")

    def _fault_found(self, name: str, text: str) -> None:
        for case in self.cases:
            if case.ailment.host == name and case.ailment.kind in FAULTS and case.ailment.at_s <= self.now_s:
                case.found_at = self.now_s if case.found_at is None else case.found_at
                return
        self.ledger.false_faults.append(f"{self.now_s:.0f} s {name}: {text}")

    def _record_changed(self, key: str, record: Record | None, revision: int) -> None:
        if key.startswith("cordons/") and record is not None:
            sick = [c for c in self.cases if f"cordons/{c.ailment.host}" == key and not is_brief(c.ailment.kind)]
            for case in sick:
                if case.cordoned_at is None and case.began_at is not None:
                    case.cordoned_at = self.now_s
            self.ledger.others_cordoned += not any(case.cordoned_at for case in sick)
        if not isinstance(record, GenerationRecord):
            return
        if record.phase is Phase.ENDED:
            self.ended = record
            return
        is_new = record.phase is Phase.READY and record.number not in self._started
        if is_new:
            self._started.add(record.number)
            self.members = {member.host: rank for rank, member in enumerate(record.members)}
            self._with_fold = sum(member.host in self.hosts for member in record.members)
            self.completed_step = 0 if record.resume is None else record.resume.step
            self.ledger.lost_steps += record.lost_steps
            self.crowd_ready_at = self.clock.now + START_S
        self.crowd.sees(record)
        if is_new:
            self.clock.after(START_S, lambda: self.crowd.begin(self.completed_step))


def _sample(uuid: str, ailment: Ailment) -> GpuSample:
    """What the probe reads of a GPU with this ailment."""
    match ailment.kind:
        case Kind.THROTTLED:
            return GpuSample(
                uuid, 0, ecc_uncorrected=0, throttle=("hw_thermal_slowdown",), clock_mhz=900, clock_max_mhz=1980
            )
        case Kind.ECC:
            return GpuSample(uuid, 0, ecc_uncorrected=1)
        case _:
            return GpuSample(uuid, 0, ecc_uncorrected=0, xids=(ailment.xid,))


def simulate_health(
    policy: Policy, names: tuple[str, ...], ailments: list[Ailment], hours: float, stopwatch: Callable[[], float]
) -> tuple[Ledger, list[Case]]:
    """Play a job for so many hours, run after run where it ends for a repair."""
    ledger, cases, began_s = Ledger(len(names)), [Case(each) for each in ailments], 0.0
    health = policy.health.model_copy(update={"preflight": "off"})  # the crowd measures nothing
    scene = Scene(policy.model_copy(update={"health": health}), names, cases, ledger, stopwatch)
    end_s = hours * 3600.0
    while began_s < end_s and not ledger.violations:
        world = HealthWorld(scene, began_s)
        world.play_until(end_s)
        ledger.runs += 1
        if world.ended is None:
            break
        ledger.ends[f"{world.ended.exit_code}"] += 1
        down_s = min(REPAIR_S, end_s - world.now_s)
        ledger.repair_host_s += down_s * len(names)
        for case in cases:
            if case.ailment.kind in FAULTS and case.ailment.at_s <= world.now_s:
                case.gone = True  # the host was replaced
            elif is_brief(case.ailment.kind) and case.ailment.at_s <= world.now_s + down_s:
                case.gone = True
        began_s = world.now_s + down_s
    return ledger, cases


__all__ = ["ASSUMPTIONS", "figures", "simulate_health"]
