"""The many hosts of a large job to which nothing lasting happens: what they tell, without a fold of their own.

They add up windows by the core's own rule, and answer the generation's record as a well host's fold does: they
acknowledge, hold, upload their share, start anew. All that is asked of them happens after a fixed while.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import ceil, sqrt
from random import Random
from typing import TYPE_CHECKING

from keepstep.core.records import (
    AckRecord,
    GenerationRecord,
    Held,
    NodeRecord,
    Phase,
    Record,
    Standing,
    StatusRecord,
    StoredObject,
    UploadRecord,
)
from keepstep.core.splits import Part, Split, Window, added, begin, is_full
from keepstep.core.stragglers import window_s
from keepstep.simulation.ailments import (
    COMPUTE_S,
    DATA_S,
    REST_S,
    SCATTER,
    SCATTER_HOSTS,
    SCATTER_REST,
    SYNC_S,
    WORK_S,
)

if TYPE_CHECKING:
    from keepstep.simulation.health import HealthWorld

_TICK_S = 0.25
_SAMPLED_S = 0.5
"""How often an agent looks at the wire."""
STOP_S, START_S, ENTERED_S, UPLOAD_S = 2.0, 20.0, 0.5, 3.0
"""A worker is stopped and its snapshot verified; one starts, restores, makes its first step; and so on."""


@dataclass
class Light:
    """One host of the crowd; `more_s` is by part what its newest window's steps took longer than usual, in all."""

    host: str
    usual: float
    window: Window
    more_s: dict[Part, float] = field(default_factory=dict)

    @property
    def node_id(self) -> str:
        return f"{self.host}-1"


class Crowd:
    """All hosts of a world that have no fold."""

    def __init__(self, world: HealthWorld, names: list[str], random: Random) -> None:
        self.world, self.random = world, random
        self.lights = {name: Light(name, random.lognormvariate(0.0, SCATTER_HOSTS), begin(0, 0.0)) for name in names}
        self.members: tuple[str, ...] = ()
        self._former: frozenset[str] = frozenset()
        self._due: dict[int, list[tuple[Light, int]]] = defaultdict(list)
        self._generation: GenerationRecord | None = None
        self._did: set[str] = set()

    def nodes(self) -> list[NodeRecord]:
        """What they say of themselves before anything has run."""
        return [NodeRecord(each.host, each.node_id, each.host, 1, 0, 20000, 0, True) for each in self.lights.values()]

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """They train, behind `step`."""
        now = self.world.clock.now
        for name in self.members:
            light = self.lights[name]
            light.window, light.more_s = begin(step, now), {}
            self._await(light, self.random.uniform(0.0, _SAMPLED_S))

    def _await(self, light: Light, more_s: float = 0.0) -> None:
        """Look again when its window may be full, at one of its agent's samples."""
        world = self.world
        samples = ceil(window_s(len(world.members)) / _SAMPLED_S) + self.random.random() * 0.2
        number = self._generation.number if self._generation is not None else 0
        due_at = world.clock.now + max(samples * _SAMPLED_S, world.policy.straggler.window * world.step_now_s) + more_s
        self._due[int(due_at / _TICK_S) + 1].append((light, number))

    def tick(self) -> None:
        """Windows that are full by now are told."""
        now, told = self.world.clock.now, []
        generation = self._generation
        for light, number in self._due.pop(int(now / _TICK_S), ()):
            if generation is None or number != generation.number or generation.phase is not Phase.READY:
                continue
            window = added(light.window, self._split(light))
            if not is_full(window, self.world.policy.straggler.window, window_s(len(self.world.members)), now):
                self._due[int((now + _SAMPLED_S) / _TICK_S)].append((light, number))
                continue
            told.append(self._status(light, split=window.total))
            light.window, light.more_s = begin(window.total.step, now), {}
            self._await(light)
        self.say(told)
        self.world.clock.after(_TICK_S, self.tick)

    def _split(self, light: Light) -> Split:
        """The mean of its steps since its window began; that of many log-normal draws is drawn as one."""
        step = self.world.completed_step
        steps = max(0, step - light.window.begun)
        if not steps:
            return Split(step, 0, 0.0, 0.0, 0.0, 0.0)

        def mean(usual_s: float, scatter: float, part: Part) -> float:
            return (
                usual_s * self.random.lognormvariate(0.0, scatter / sqrt(steps)) + light.more_s.get(part, 0.0) / steps
            )

        data_s = mean(DATA_S, SCATTER_REST, Part.DATA)
        compute_s = mean(COMPUTE_S * light.usual, SCATTER, Part.COMPUTE)
        rest_s = mean(REST_S, SCATTER_REST, Part.REST)
        wait_s = max(SYNC_S, self.world.step_now_s - data_s - compute_s - rest_s)
        return Split(step, steps, data_s, compute_s, wait_s, rest_s)

    def slowest_s(self) -> float:
        """What the slowest of so many well hosts works on one step: the largest of that many draws."""
        count = max(1, len(self.world.members))
        drawn = self.random.random() ** (1.0 / count)
        z = self.world.normal.inv_cdf(min(max(drawn, 1e-9), 1 - 1e-12))
        return WORK_S * (1.0 + sqrt(SCATTER**2 + SCATTER_HOSTS**2) * z)

    # --- the generation's record -------------------------------------------------------------------------------------

    def sees(self, record: GenerationRecord) -> None:
        """The record changed: do what a well host's fold would do, once."""
        known = self._generation
        if known is None or known.number != record.number:
            self._did = set()
            if known is not None:
                self._former = frozenset(self.members) if known.phase is Phase.READY else self._former
        self._generation = record
        self.members = tuple(member.host for member in record.members if member.host in self.lights)
        if record.phase is Phase.FORMING:
            self._later("ack", STOP_S, self._acks)
        elif record.pause and record.phase is Phase.READY and not record.drain_step:
            self._later("entered", ENTERED_S, self._entered)
        if record.drain_step and record.phase is Phase.READY:
            self.completed(self.world.completed_step)
        if record.save_step and (record.phase is Phase.FORMING or self.world.completed_step >= record.save_step):
            self._later(f"upload {record.save_step}", UPLOAD_S, self._uploads)

    def completed(self, step: int) -> None:
        """A step of the world is done: what was to happen behind it happens."""
        record = self._generation
        if record is None or record.phase is not Phase.READY:
            return
        if record.save_step and step >= record.save_step:
            self._later(f"upload {record.save_step}", UPLOAD_S, self._uploads)
        if record.drain_step and step >= record.drain_step:
            self._later("sealed", ENTERED_S, self._entered)

    def _later(self, what: str, seconds: float, make: object) -> None:
        record = self._generation
        if what in self._did or record is None:
            return
        self._did.add(what)

        def do() -> None:
            if self._generation is not None and self._generation.number == record.number:
                self.say(make(self._generation))  # type: ignore[operator]

        self.world.clock.after(seconds, do)

    def _acks(self, record: GenerationRecord) -> list[Record]:
        held = tuple(Held(step, f"d{step}") for step in self.world.sealed_steps())
        former = self._former
        step = self.world.completed_step
        return [
            AckRecord(record.number, name, f"{name}-1", step if name in former else 0, held if name in former else ())
            for name in dict.fromkeys((*self.members, *(m.host for m in record.leaving if m.host in self.lights)))
        ]

    def _entered(self, record: GenerationRecord) -> list[Record]:
        entered = min(self.world.completed_step + 1, record.drain_step or self.world.completed_step + 1)
        sealed = record.drain_step if self.world.completed_step >= record.drain_step > 0 else 0
        return [self._status(self.lights[name], entered=entered, sealed=sealed) for name in self.members]

    def _uploads(self, record: GenerationRecord) -> list[Record]:
        step = record.save_step
        ranks = {member.host: rank for rank, member in enumerate(record.members)}
        return [
            UploadRecord(
                record.number, step, name, f"d{step}",
                (StoredObject(f"o{step}.{ranks[name]}", "replicated", ranks[name], 0, 1, "0"),), UPLOAD_S,
            )
            for name in self.members
        ]  # fmt: skip

    def _status(self, light: Light, *, split: Split | None = None, entered: int = -1, sealed: int = 0) -> StatusRecord:
        number = self._generation.number if self._generation is not None else 0
        step = self.world.completed_step
        return StatusRecord(
            light.host, light.node_id, number, Standing.RUNNING, entered=entered, step=step, sealed=sealed,
            splits=() if split is None else (split,),
        )  # fmt: skip

    def say(self, records: list[Record] | list[StatusRecord]) -> None:
        """The leader hears of these; nobody else watches what nodes say of themselves."""
        if records:
            self.world.leader.hears(list(records))
