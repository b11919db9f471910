"""What must be sampled: the heartbeat ring and the seals of this host's worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from keepstep.adapters.clock import Clock, sleep
from keepstep.adapters.memory import available_bytes
from keepstep.adapters.worker_link import WorkerLink
from keepstep.core import events as e
from keepstep.core.events import Event, SlabSeal
from keepstep.core.fingerprints import Fingerprint
from keepstep.core.splits import Split
from keepstep.core.stalls import Activity
from keepstep.core.values import evolve
from keepstep.ports import MetricsSink
from keepstep_worker import wire as wires
from keepstep_worker.wire import Progress, StepRecord

FIRST_EVERY_S = 0.2
"""Until the first step is seen: a recovery ends with it."""
EVERY_S = 0.5
"""Afterwards: progress is no news, and each sample is a turn of the fold."""

_WHY_MAX = 200

_BETWEEN_NS = 1_000_000_000
"""What lies between two steps and is longer is no part of the pace: an evaluation, a checkpoint of the script's."""

Learn = Callable[[str, Mapping[str, object]], None]
"""Told what a worker says of its imports."""


class Sampler:
    """Reads the worker's side of the wire and the messages beside it; posts what is new."""

    def __init__(
        self, link: WorkerLink, clock: Clock, metrics: MetricsSink, post: Callable[[Event], None], learn: Learn
    ) -> None:
        self._link, self._clock, self._metrics, self._post, self._learn = link, clock, metrics, post, learn
        self._worker_id = ""
        self._rank = 0
        self._stepped = False
        self._seal = 0
        self._restore = -1
        self._in_a_loop = self._evaluates = False
        self._seen = Progress()
        self._seen_at = self._silent_s = 0.0
        self._ended_ns = 0
        self.on_profiled: Learn = lambda worker_id, message: None
        """Called when a worker says that it was profiled."""

    def begin(self, worker_id: str, rank: int, restore_slab: int) -> None:
        """A worker is about to start."""
        self._worker_id, self._rank, self._stepped = worker_id, rank, False
        self._restore, self._in_a_loop, self._evaluates = restore_slab, False, False
        self._seen, self._seen_at, self._silent_s = Progress(), self._clock.now(), 0.0
        self._ended_ns = 0
        self._seal = max((seal.sequence for seal in self._link.seals()), default=0)
        self._metrics.forget_ranks()

    def rank_of(self, worker_id: str) -> int | None:
        """The rank of the worker that was started last; None of any other."""
        return self._rank if worker_id == self._worker_id else None

    async def run(self) -> None:
        """Sample at the pace that the worker's progress asks for. Never ends."""
        while True:
            await sleep(EVERY_S if self._stepped else FIRST_EVERY_S)
            if self._worker_id:
                self.sample()

    def on_message(self, worker_id: str, message: dict[str, object]) -> None:
        """A worker said something on its socket; `sealed` is a hint to look at the wire at once."""
        if worker_id != self._worker_id:
            return
        match message.get("kind"):
            case "hello":
                if self._restore >= 0:
                    self._link.hand(worker_id, (self._restore,))
                self._post(e.WorkerHello(worker_id))
            case "joined":
                self._in_a_loop = message.get("how") == "loop"
                self._post(e.WorkerJoined(worker_id, str(message.get("how"))))
            case "divides":
                self._post(e.WorkerDivides(worker_id))
            case "fingerprint":
                value, why = str(message.get("value") or ""), str(message.get("why") or "")[:_WHY_MAX]
                self._post(e.WorkerFingerprinted(worker_id, Fingerprint(_whole(message, "step"), value[:16], why)))
            case "imported" | "unfit":
                self._learn(worker_id, message)
            case "profiled":
                self.on_profiled(worker_id, message)
            case "restored":
                seconds, data_s = _real(message, "seconds"), _real(message, "data_s")
                self._post(e.WorkerRestored(worker_id, _whole(message, "step"), seconds, data_s))
            case "layout":
                layout, size_bytes = _whole(message, "layout"), _whole(message, "bytes")
                self._post(e.LayoutAnnounced(worker_id, layout, size_bytes, available_bytes()))
            case "metric":
                self._metrics.script_metric(self._rank, str(message.get("name")), _real(message, "value"))
            case "sealed":  # the last chance to see the steps of a worker that is drained
                self.sample()

    def sample(self) -> None:
        """Read the ring and the seals once."""
        self._look_at_seals()
        records, lost = self._link.records()
        if lost:
            self._ended_ns = 0  # what lies between is unknown
        progress = self._link.progress()
        self._listen(progress)
        if records:
            self._tell_steps(records, progress)
        evaluates = self.pulse()[0] is Activity.EVALUATION
        if evaluates != self._evaluates:
            self._evaluates = evaluates
            self._post(e.WorkerEvaluates(self._worker_id, evaluates))

    def _tell_steps(self, records: Sequence[StepRecord], progress: Progress) -> None:
        split = split_of(records if self._stepped else records[1:], self._ended_ns)  # the first one is traced
        step_s = mean_step_s(records, self._ended_ns)
        self._ended_ns = records[-1].end_ns
        if not self._stepped:
            self._stepped = True
            at = self._clock.to_unix(records[0].end_ns / 1e9)
            self._post(e.FirstStepCompleted(self._worker_id, records[0].step, at))
        waited_s = 0.0 if split is None else split.wait_s * len(records)
        splits = self._splits(split)
        self._post(e.StepsSampled(
            self._worker_id, progress.entered_step, records[-1].step, round(step_s, 6),
            round(progress.snapshot_ns / 1e9, 6), round(waited_s, 6), splits,
        ))  # fmt: skip
        self._metrics.step(records[-1].step)
        for each in splits:
            self._metrics.step_split(each.rank if each.rank >= 0 else self._rank, each)

    def _splits(self, own: Split | None) -> tuple[Split, ...]:
        """Where the steps of all ranks of this host went, as far as that was measured."""
        found = [] if own is None else [evolve(own, rank=self._link.first_rank)]
        for rank, records in self._link.records_of_others().items():
            split = split_of(records[1:], records[0].end_ns)
            if split is not None:
                found.append(evolve(split, rank=rank))
        return tuple(found)

    def pulse(self) -> tuple[Activity, float]:
        """What the worker is about, and for how many seconds of looking it has published nothing."""
        return self.activity_of(self._seen), self._silent_s

    def activity_of(self, progress: Progress) -> Activity:
        """What a rank of this host is about."""
        return activity_of(progress, self._stepped, self._in_a_loop)

    def silent_since(self) -> float:
        """Since when it has published nothing, unix seconds; time in which nobody looked does not count."""
        return self._clock.now() - self._silent_s

    def _listen(self, progress: Progress) -> None:
        """Whatever a worker publishes, it does on the path of its steps. Time in which nobody looked does not count."""
        now = self._clock.now()
        looked_s, self._seen_at = min(now - self._seen_at, 2 * EVERY_S), now
        self._silent_s = self._silent_s + looked_s if progress == self._seen else 0.0
        self._seen = progress

    def _look_at_seals(self) -> None:
        for seal in sorted(self._link.seals(), key=lambda seal: seal.sequence):
            if seal.sequence > self._seal:
                self._seal = seal.sequence
                seconds = self._link.progress().snapshot_ns / 1e9
                self._metrics.snapshot(seconds)
                known = SlabSeal(seal.slab, seal.step, seal.sequence, seal.size_bytes)
                self._post(e.SnapshotSealed(self._worker_id, known, round(seconds, 6)))


def activity_of(progress: Progress, stepped: bool, in_a_loop: bool) -> Activity:
    """What a worker is about by what it published; a loop of the script's own may evaluate within a step."""
    if progress.phase in (wires.PHASE_NONE, wires.PHASE_HELLO):
        return Activity.START
    if progress.phase in (wires.PHASE_FINISHED, wires.PHASE_DRAINED):
        return Activity.FINISHED
    if not stepped:
        return Activity.FIRST_STEP
    if progress.phase == wires.PHASE_EVALUATING:
        return Activity.EVALUATION
    if progress.phase == wires.PHASE_EPOCH:
        return Activity.EPOCH
    between = progress.phase == wires.PHASE_PAUSED or progress.entered_step == progress.completed_step
    return Activity.PAUSE if between or in_a_loop else Activity.STEP


def mean_step_s(records: Sequence[StepRecord], ended_ns: int = 0) -> float:
    """Seconds from the end of one step to the end of the next.

    Of a single record from its start, where it is not known when the step before it ended (`ended_ns`), or that was so
    long ago that something else lay between.
    """
    if len(records) > 1:
        return max(0.0, (records[-1].end_ns - records[0].end_ns) / (len(records) - 1) / 1e9)
    start_ns = records[0].start_ns
    begun_ns = ended_ns if ended_ns > 0 and start_ns - ended_ns < _BETWEEN_NS else start_ns
    return max(0.0, (records[0].end_ns - begun_ns) / 1e9)


def split_of(records: Sequence[StepRecord], ended_ns: int = 0) -> Split | None:
    """Where the time of the steps went, over those whose gradients were timed; None where there are none.

    Args:
        records: in order, without gaps.
        ended_ns: when the step before the first of them ended, 0 where that is not known.
    """
    timed = [_parts(r) for r in records if r.gradients_ready_ns and r.start_ns]
    several = any(after.step > before.step + 1 for before, after in pairwise(records))
    if not timed or several:  # of several steps in one execution only the last one's moments are known
        return None
    begins = [record.start_ns for record in records]
    ends = [ended_ns or records[0].start_ns, *(record.end_ns for record in records[:-1])]
    rest_ns = sum(max(0, begin - end) for begin, end in zip(begins, ends, strict=True))
    data_s, compute_s, wait_s = (round(sum(part) / len(timed) / 1e9, 7) for part in zip(*timed, strict=True))
    return Split(records[-1].step, len(timed), data_s, compute_s, wait_s, round(rest_ns / len(records) / 1e9, 7))


def _parts(record: StepRecord) -> tuple[int, int, int]:
    """Nanoseconds of a step for data, for its own computing, and for waiting: to agree on the batch, and at the end."""
    data_ready_ns = max(record.start_ns, record.data_ready_ns)
    begun_ns = max(data_ready_ns, record.begun_ns)
    ready_ns = max(begun_ns, record.gradients_ready_ns)
    waited_ns = begun_ns - data_ready_ns + max(0, record.end_ns - ready_ns)
    return data_ready_ns - record.start_ns, ready_ns - begun_ns, waited_ns


def _whole(message: dict[str, object], name: str) -> int:
    value = message.get(name)
    return value if isinstance(value, int) and value >= 0 else 0


def _real(message: dict[str, object], name: str) -> float:
    value = message.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
