"""The other host, `algo-2` if not said otherwise, as far as `algo-1` can tell.

Its records mirror those of `algo-1`, but for what is said here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from keepstep.core.causes import FailureCause
from keepstep.core.events import RecordSeen
from keepstep.core.preflight_records import PreflightPlan, PreflightRecord
from keepstep.core.preflight_verdict import partners_of
from keepstep.core.records import (
    AckRecord,
    Failure,
    GenerationRecord,
    LeaderRecord,
    NodeRecord,
    Phase,
    RequestRecord,
    Standing,
    StatusRecord,
    StoredObject,
    UploadRecord,
)
from keepstep.core.splits import Split
from keepstep.core.stalls import Activity, Stall

if TYPE_CHECKING:
    from tests.scenarios.stage import Stage


def split_of(step: int, own_ms: float, part: str, rank: int = -1) -> Split:
    """A window of steps of 100 ms, 20 of which are computed anyhow."""
    parts = {"data": 0.0, "compute": 0.020, "rest": 0.0}
    parts[part] += own_ms / 1e3 - 0.020
    data_s, compute_s, rest_s = parts.values()
    return Split(step, 5, data_s, compute_s, 0.1 - own_ms / 1e3, rest_s, rank)


class Peer:
    """A node that acknowledges, trains, uploads and leaves as the one on the stage does, `lag` where it lags behind."""

    def __init__(self, stage: Stage, host: str) -> None:
        self.stage, self.host = stage, host
        self.boot = 0
        self.there = self.silent = False
        self.failure: Failure | None = None
        self.holds_only: int | None = None
        self.diverges = self.done = False
        self.stall: Stall | None = None
        self.joins = True
        self.splits: tuple[Split, ...] = ()
        self.value: str | None = None

    @property
    def node_id(self) -> str:
        return f"two-{self.boot}"

    def arrives(self) -> None:
        self.boot += 1
        self.there, self.failure = True, None
        lease, fresh = 100 + self.boot, self.boot == 1
        self._put(NodeRecord(self.host, self.node_id, "10.0.0.2", lease, port_base=20000, fresh=fresh))

    def vanishes(self) -> None:
        """Its lease expires, and with it all that was bound to it."""
        self.there = False
        for key in [key for key, (record, _) in self.stage.records.items() if getattr(record, "host", "") == self.host]:
            if not key.startswith("uploads/"):
                self.stage.vanish(key)

    def returns(self) -> None:
        """Its agent died and came back: the same host, another node, with nothing in its slabs."""
        self.holds_only = 0
        self.vanishes()
        self.arrives()

    def swaps(self) -> None:
        """Another incarnation takes the host's key before the lease of the old one has run out."""
        self.arrives()

    def fails(self, cause: str = "killed", seconds_ago: str = "0", kind: str = "") -> None:
        at = self.stage.now - float(seconds_ago)
        signal, code = (9, None) if cause == "killed" else (None, 1)
        error = "" if cause == "killed" else "UnavailableError" if kind else "ValueError"
        step = self.stage.state.completed + 1
        self.failure = Failure(FailureCause(cause), self.host, at, 1, step, code, signal, error, "", kind == "victim")
        self._status()

    def fell_first(self, seconds_ago: str) -> None:
        """Its worker raised a while ago; the others have not heard of it yet."""
        at = self.stage.now - float(seconds_ago)
        step = self.stage.state.completed + 1
        self.failure = Failure(FailureCause.USER_CODE, self.host, at, 1, step, 1, None, "ValueError", "no such file")

    def holds(self, step: str) -> None:
        """From now on it offers this snapshot alone."""
        self.holds_only = int(step)

    def corrupts(self) -> None:
        """Its replica is not what the others have."""
        self.diverges = True

    def finishes(self) -> None:
        self.done = True
        self._status()

    def never_joins(self) -> None:
        """Its script does something else than to come to its training."""
        self.joins = False

    def stands_still(self, entered: str, process: str = "S", doing: str = "pause") -> None:
        """Its worker gives no sign, as its agent has found out by now."""
        step, completed = int(entered), self.stage.state.completed
        self.stall = Stall(Activity(doing), self.stage.now, step, completed, process, calls=("train.py:30 callback",))
        self._status()

    def goes_on(self) -> None:
        self.stall = None
        self._status()

    def works(self, step: str, own_ms: str, part: str = "compute") -> None:
        """Its newest window: what a step takes of its own, in that part, of 100 ms; the rest it waits."""
        self.splits = (split_of(int(step), float(own_ms), part),)
        self._status()

    def rank_works(self, step: str, *own_ms: str) -> None:
        """The same of each of its ranks that mpirun has started, behind those of the first host."""
        count = len(own_ms)
        self.splits = tuple(split_of(int(step), float(ms), "compute", count + n) for n, ms in enumerate(own_ms))
        self._status()

    def computes(self, value: str) -> None:
        """In the step that is looked at it has another fingerprint than the host on the stage."""
        self.value = value

    def is_interrupted(self) -> None:
        now = self.stage.now
        self._put(RequestRecord(self.host, "sigterm", now, now + 110.0))

    def falls_silent(self) -> None:
        """It is frozen: its records stand, it writes no new ones."""
        self.silent = True

    def leads(self) -> None:
        """It was the first to take the leader's key."""
        self._put(LeaderRecord(self.host, self.node_id))

    # --- what it does by itself --------------------------------------------------------------------------------------

    def react(self) -> None:
        """Mirror what the generation wants."""
        generation = self._generation()
        if self.there and not self.silent:
            self._be_checked()
        if not self.there or self.silent or generation is None:
            return
        if generation.phase is Phase.FORMING and generation.asks(self.node_id):
            self._ack(generation)
        if not generation.has(self.node_id):
            return
        if generation.phase is not Phase.FORMING:
            self._status()
        self._upload(generation)

    def _generation(self) -> GenerationRecord | None:
        kept = self.stage.records.get("generation")
        return None if kept is None else kept[0]

    def _be_checked(self) -> None:
        plan, _ = self.stage.records.get("preflight", (None, 0))
        if not isinstance(plan, PreflightPlan) or self.node_id not in [guest.node_id for guest in plan.guests]:
            return
        found = self.stage.found(self.host, partners_of(plan, self.host))
        quiet = self.stage.state.policy.health.preflight != "warn"
        self._put(PreflightRecord(self.host, self.node_id, plan.number, "ml.test", quiet, *found, 2.0))

    def _ack(self, generation: GenerationRecord) -> None:
        key = f"acks/{generation.number}/algo-1"
        mine, _ = self.stage.records.get(key, (None, 0))
        if mine is None and generation.asks("one"):
            return
        held = () if mine is None else mine.held
        if self.holds_only is not None:
            held = tuple(each for each in held if each.step == self.holds_only)
        failure, self.failure, self.done, self.stall = self.failure, None, False, None
        completed = 0 if mine is None else mine.completed
        self._put(AckRecord(generation.number, self.host, self.node_id, completed, held, failure))

    def _status(self) -> None:
        generation = self._generation()
        if generation is None or generation.phase is Phase.FORMING or not generation.has(self.node_id):
            return
        mine = self.stage.records.get("status/algo-1")
        if mine is None and self.failure is None and generation.has("one"):
            return
        seen = mine[0] if mine is not None else StatusRecord(self.host, "", generation.number, Standing.RUNNING)
        standing = Standing.DONE if self.done else seen.standing
        others_own = (Standing.FAILED, Standing.SERVING)
        if (seen.standing in others_own and not self.done) or (seen.standing is Standing.DONE and not self.done):
            standing = Standing.RUNNING
        if seen.standing is Standing.LEFT:
            standing = Standing.LEFT
        if self.failure is not None:
            standing = Standing.FAILED
        found = seen.fingerprint
        if found is not None and self.value is not None:
            found = replace(found, value=self.value)
        self._put(
            replace(seen, host=self.host, node_id=self.node_id, standing=standing, failure=self.failure,
                    generation=generation.number, stall=self.stall, splits=self.splits, fingerprint=found,
                    joined=self.joins and seen.joined)
        )  # fmt: skip

    def _upload(self, generation: GenerationRecord) -> None:
        mine = self.stage.records.get(f"uploads/{generation.number}/{generation.save_step}/algo-1")
        if not generation.save_step or mine is None:
            return
        objects = (StoredObject(f"o{generation.save_step}.1", "replicated", 1, 0, 1, "0"),)
        digest = "other" if self.diverges else mine[0].digest
        self._put(UploadRecord(generation.number, generation.save_step, self.host, digest, objects))

    def _put(self, record: object) -> None:
        kept = self.stage.records.get(record.key)
        if kept is None or kept[0] != record:
            revision = self.stage.write(record)
            if self.stage.watches(record.key):
                self.stage.post(RecordSeen(record, revision))
