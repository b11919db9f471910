"""What crosses the line between a worker and its supervisor, version 1.

One memfd per local rank holds a control page and a heartbeat ring. The page is cut into regions with one writer each;
every
region and every ring record ends in a CRC, so a reader never depends on the order in which another processor's stores
arrive: it reads again until the CRC holds, or says that nothing valid is there (the writer may have been killed in
mid-store).

    0     HEAD      written once by the agent      magic, version, ring geometry
    128   ORDERS    written by the agent           hold, drain step, grant, cadence, restore, profile, fingerprint
    512   PROGRESS  written by the worker          phase, entered step, completed step
    1024  SEALS     8 x 64 bytes, one per slab     written by the worker (by the agent while no worker runs)
    4096  RING      capacity x 64 bytes            written by the worker, one record per completed step

A slab is a memfd of its own. Sealed, it is a valid safetensors file, byte for byte; that it is sealed, and for which
step, is said in SEALS and nowhere else. All integers are little-endian. Times are CLOCK_MONOTONIC nanoseconds, 0
where unknown.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import NamedTuple

MAGIC = b"KSWIRE1\0"
VERSION = 1
PAGE_BYTES = 4096
RECORD_BYTES = 64
RING_CAPACITY = 1024
SLAB_SLOTS = 8
STACKS_SIGNAL = 34 + 9
"""SIGRTMIN and nine: on it a worker writes the stacks of its threads to a file."""
INQUIRIES = "inquiries"
"""The message with the descriptor by which a worker can be asked what it is not about to say."""
READY, STACKS = "ready", "stacks"
"""What it is asked, behind the question's number: whether its gradients are ready; to write its stacks to a file."""
ANSWER_BYTES_MAX = 64
NO_SLAB = -1
"""Stands for "no slab" in a grant or a restore order."""

PHASE_NONE = 0
PHASE_HELLO = 1
"""The bootstrap runs; nothing is known of the script yet."""
PHASE_JOINED = 2
"""An instrumented `fit` or `join()` was entered: steps will be reported."""
PHASE_DRAINED = 3
"""The worker sealed the drain step and will never return to the script."""
PHASE_FINISHED = 4
"""The last known step is done; the script runs on to its end."""
PHASE_PAUSED = 5
"""Joined, and in what lies between two steps."""
PHASE_EVALUATING = 6
"""Joined, and in an evaluation; each of its batches is published."""
PHASE_EPOCH = 7
"""Joined, and in the first step of an epoch, whose data are made ready."""

_HEAD = struct.Struct("<8sIIII")
_ORDERS = struct.Struct("<QQIIQiIiIQ")
_PROGRESS = struct.Struct("<QQIIQQQQQ")
_SEAL = struct.Struct("<QQQQIIQ")
_RECORD = struct.Struct("<QQQQQQQ")
_CRC = struct.Struct("<I")
_AT_HEAD, _AT_ORDERS, _AT_PROGRESS, _AT_SEALS = 0, 128, 512, 1024
_READ_ATTEMPTS = 64
_STEP_MAX = 2**32 - 1
"""What a fingerprint is wanted of stands in four bytes that once had no meaning: later steps are not looked at."""


class WireError(Exception):
    """The memory handed over is not a wire of this version."""


class Orders(NamedTuple):
    """What the agent wants of the worker.

    Attributes:
        sequence: grows by one with each change.
        generation: the generation these orders are for; a worker of another one ignores them.
        hold: 1 while the worker must not enter a step beyond `drain_step`.
        drain_step: last step to execute before sealing and blocking; 0 until it is agreed.
        grant: slab the worker may write its next snapshot to, or NO_SLAB.
        snapshot_every: steps between snapshots; 0 takes none but the drain's.
        restore_slab: sealed slab to restore from, or NO_SLAB for a fresh start.
        restore_step: the step that slab must be sealed for.
        profile: number of the newest profile that is wanted; what of, a message says.
        fingerprint: the step whose local gradients are to be looked at; 0 for none.
    """

    sequence: int = 0
    generation: int = 0
    hold: int = 0
    snapshot_every: int = 0
    drain_step: int = 0
    grant: int = NO_SLAB
    restore_slab: int = NO_SLAB
    restore_step: int = 0
    profile: int = 0
    fingerprint: int = 0


class StepTimes(NamedTuple):
    """When the parts of one step were over: monotonic nanoseconds, 0 where not measured."""

    data_ready_ns: int = 0
    gradients_ready_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0


class Progress(NamedTuple):
    """Where the worker stands.

    Attributes:
        entered_step: published before a step is executed, and before `hold` is read.
        completed_step: the newest step whose update was applied, the restored one at first.
        last_step: the last step this training will execute, 0 where unknown.
        snapshot_ns: how long the newest snapshot kept the step path waiting, and by how much what was copied beside the
            steps is reckoned to have slowed them.
        skipped: snapshots that were due and found no slab granted.
    """

    sequence: int = 0
    generation: int = 0
    phase: int = PHASE_NONE
    pid: int = 0
    entered_step: int = 0
    completed_step: int = 0
    last_step: int = 0
    snapshot_ns: int = 0
    skipped: int = 0


class Seal(NamedTuple):
    """A sealed slab: which step it holds, and how long the file is.

    Attributes:
        slab: number of the slab; its slot is `slab % SLAB_SLOTS`.
        step: completed step whose state the slab holds.
        sequence: grows with each seal of this rank, so that two seals of one slab differ.
        size_bytes: length of the safetensors file.
        layout: number of the layout (the set of tensors and their sizes).
        generation: the generation that wrote it.
    """

    slab: int
    step: int
    sequence: int
    size_bytes: int
    layout: int
    generation: int
    sealed_ns: int


class StepRecord(NamedTuple):
    """One completed step of one rank; monotonic nanoseconds, 0 where not measured."""

    sequence: int
    step: int
    start_ns: int
    data_ready_ns: int
    gradients_ready_ns: int
    end_ns: int
    begun_ns: int = 0
    """When own work began: after the data were there, and the ranks had agreed that all of them have some."""


class Wire:
    """A view of one local rank's control page and ring; either side may hold one."""

    def __init__(self, fd: int) -> None:
        """Map the memory behind `fd`, which stays open and belongs to the caller.

        Raises:
            WireError: the memory is too small, or of another version.
        """
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            raise WireError(f"wire of {size} bytes, wanted at least {PAGE_BYTES}")
        self._memory = mmap.mmap(fd, size)
        magic, version, ring_at, capacity, record_bytes = _HEAD.unpack_from(self._memory, _AT_HEAD)
        if magic != MAGIC or version != VERSION or record_bytes != RECORD_BYTES:
            raise WireError(f"magic {magic!r} version {version}, wanted {MAGIC!r} version {VERSION}")
        if ring_at + capacity * record_bytes > size:
            raise WireError(f"ring of {capacity} records does not fit into {size} bytes")
        self._ring_at: int = ring_at
        self.capacity: int = capacity

    @staticmethod
    def create() -> int:
        """Make an empty wire and return its file descriptor (close-on-exec)."""
        fd = os.memfd_create("keepstep-wire", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES + RING_CAPACITY * RECORD_BYTES)
        head = _HEAD.pack(MAGIC, VERSION, PAGE_BYTES, RING_CAPACITY, RECORD_BYTES)
        os.pwrite(fd, head + _CRC.pack(zlib.crc32(head)), _AT_HEAD)
        return fd

    def close(self) -> None:
        self._memory.close()

    # --- regions -----------------------------------------------------------------------------------------------------

    def write_orders(self, orders: Orders) -> None:
        """Agent: publish orders."""
        self._put(
            _AT_ORDERS,
            _ORDERS.pack(
                orders.sequence,
                orders.generation,
                orders.hold,
                orders.snapshot_every,
                orders.drain_step,
                orders.grant,
                orders.profile,
                orders.restore_slab,
                orders.fingerprint if orders.fingerprint <= _STEP_MAX else 0,
                orders.restore_step,
            ),
        )

    def read_orders(self) -> Orders:
        """Worker: the newest orders; the defaults where none were ever written."""
        raw = self._get(_AT_ORDERS, _ORDERS.size)
        if raw is None:
            return Orders()
        sequence, generation, hold, every, drain, grant, profile, slab, fingerprint, step = _ORDERS.unpack(raw)
        return Orders(sequence, generation, hold, every, drain, grant, slab, step, profile, fingerprint)

    def write_progress(self, progress: Progress) -> None:
        """Worker: publish where it stands."""
        self._put(
            _AT_PROGRESS,
            _PROGRESS.pack(
                progress.sequence,
                progress.generation,
                progress.phase,
                progress.pid,
                progress.entered_step,
                progress.completed_step,
                progress.last_step,
                progress.snapshot_ns,
                progress.skipped,
            ),
        )

    def read_progress(self) -> Progress:
        """Agent: where the worker stands; the defaults where nothing was published."""
        raw = self._get(_AT_PROGRESS, _PROGRESS.size)
        return Progress() if raw is None else Progress(*_PROGRESS.unpack(raw))

    def write_seal(self, seal: Seal) -> None:
        """Declare a slab sealed. The slab's bytes must be complete by now."""
        self._put(
            self._seal_at(seal.slab),
            _SEAL.pack(
                seal.step, seal.sequence, seal.size_bytes, seal.generation, seal.slab, seal.layout, seal.sealed_ns
            ),
        )

    def clear_seal(self, slab: int) -> None:
        """Take a slab's seal away: do so before its first byte is overwritten."""
        at = self._seal_at(slab)
        self._memory[at : at + RECORD_BYTES] = bytes(RECORD_BYTES)

    def read_seals(self) -> list[Seal]:
        """All valid seals, oldest step first (and oldest sequence among equal steps)."""
        seals = []
        for slot in range(SLAB_SLOTS):
            raw = self._get(_AT_SEALS + slot * RECORD_BYTES, _SEAL.size)
            if raw is not None:
                step, sequence, size_bytes, generation, slab, layout, sealed_ns = _SEAL.unpack(raw)
                seals.append(Seal(slab, step, sequence, size_bytes, layout, generation, sealed_ns))
        return sorted(seals, key=lambda seal: (seal.step, seal.sequence))

    # --- ring --------------------------------------------------------------------------------------------------------

    def append(self, record: StepRecord) -> None:
        """Worker: add a record; its sequence says where it goes."""
        body = _RECORD.pack(
            record.sequence,
            record.step,
            record.start_ns,
            record.data_ready_ns,
            record.gradients_ready_ns,
            record.end_ns,
            record.begun_ns,
        )
        self._put(self._record_at(record.sequence), body)

    def read_since(self, sequence: int) -> tuple[list[StepRecord], int]:
        """Agent: records after `sequence`, in order, and how many were overwritten before they could be read."""
        if sequence == 0 and self._record(1 % self.capacity) is None:  # nothing yet: no need to look at the whole ring
            return [], 0
        newest = (
            max((r.sequence for r in map(self._record, range(self.capacity)) if r is not None), default=0)
            if sequence == 0
            else self._newest_after(sequence)
        )
        first = max(sequence + 1, newest - self.capacity + 1)
        found = []
        for wanted in range(first, newest + 1):
            record = self._record(wanted % self.capacity)
            if record is not None and record.sequence == wanted:
                found.append(record)
        return found, (newest - sequence) - len(found)

    def reset_worker(self) -> None:
        """Agent: forget the last worker's progress and ring, keep the seals. No worker may be running."""
        self._memory[_AT_PROGRESS : _AT_PROGRESS + _PROGRESS.size + _CRC.size] = bytes(_PROGRESS.size + _CRC.size)
        end = self._ring_at + self.capacity * RECORD_BYTES
        self._memory[self._ring_at : end] = bytes(end - self._ring_at)

    def _newest_after(self, sequence: int) -> int:
        newest = sequence
        for wanted in range(sequence + 1, sequence + 1 + self.capacity):
            record = self._record(wanted % self.capacity)
            if record is None or record.sequence < wanted:
                break
            newest = max(newest, record.sequence)
        return newest

    def _record(self, slot: int) -> StepRecord | None:
        raw = self._get(self._ring_at + slot * RECORD_BYTES, _RECORD.size)
        return None if raw is None else StepRecord(*_RECORD.unpack(raw))

    def _record_at(self, sequence: int) -> int:
        return self._ring_at + (sequence % self.capacity) * RECORD_BYTES

    def _seal_at(self, slab: int) -> int:
        return _AT_SEALS + (slab % SLAB_SLOTS) * RECORD_BYTES

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _put(self, at: int, body: bytes) -> None:
        self._memory[at : at + len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))

    def _get(self, at: int, size: int) -> bytes | None:
        """The region's bytes once its CRC holds; None where it is empty or was left torn."""
        for _ in range(_READ_ATTEMPTS):
            raw = self._memory[at : at + size + _CRC.size]
            body = raw[:size]
            if _CRC.unpack(raw[size:])[0] == zlib.crc32(body):
                return body
            if not any(raw):
                return None
        return None


def changed(orders: Orders, **fields: int) -> Orders:
    """The next orders: `fields` replaced and the sequence one higher."""
    return orders._replace(sequence=orders.sequence + 1, **fields)
