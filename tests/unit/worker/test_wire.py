"""The wire of version 1: an old file still parses, and no half-written region is ever believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep_worker import wire as wires
from keepstep_worker.wire import Orders, Progress, Seal, StepRecord, Wire, WireError

GOLDEN = Path(__file__).parent / "golden" / "wire-v1.bin"
OLD_ORDERS = Orders(sequence=1, generation=1, hold=0, snapshot_every=10, grant=2, restore_slab=1, restore_step=40)
NEW_ORDERS = Orders(sequence=2, generation=1, hold=1, snapshot_every=10, drain_step=77, grant=0)
OLD_PROGRESS = Progress(1, 1, wires.PHASE_JOINED, 10, 5, 4, 100, 5_000, 0)
NEW_PROGRESS = Progress(2, 1, wires.PHASE_JOINED, 10, 6, 5, 100, 5_000, 1)

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


@pytest.fixture
def made():
    fd = Wire.create()
    wire = Wire(fd)
    yield fd, wire
    wire.close()
    os.close(fd)


@pytest.fixture
def golden():
    fd = memory(GOLDEN.read_bytes())
    wire = Wire(fd)
    yield wire
    wire.close()
    os.close(fd)


def test_golden_orders_and_progress(golden):
    assert golden.read_orders() == Orders(7, 3, 1, 25, 1234, 5, 4, 1200)
    assert golden.read_progress() == Progress(99, 3, wires.PHASE_JOINED, 4321, 1231, 1230, 10_000, 1_500_000, 2)


def test_golden_seals(golden):
    assert golden.read_seals() == [
        Seal(3, 1175, 40, 123456, 0xDEADBEEF, 2, 10**15),
        Seal(4, 1200, 41, 123457, 0xDEADBEEF, 2, 10**15 + 1),
        Seal(5, 1225, 42, 123458, 0xDEADBEEF, 3, 10**15 + 2),
    ]


def test_golden_ring_keeps_the_newest_records(golden):
    records, lost = golden.read_since(0)
    assert golden.capacity == 8
    assert lost == 2
    assert records == [
        StepRecord(i, 1220 + i, i * 1000, i * 1000 + 100, i * 1000 + 700, i * 1000 + 900) for i in range(3, 11)
    ]


def test_a_new_wire_says_nothing(made):
    _, wire = made
    assert wire.read_orders() == Orders()
    assert wire.read_progress() == Progress()
    assert wire.read_seals() == []
    assert wire.read_since(0) == ([], 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(wires.PAGE_BYTES),
        GOLDEN.read_bytes()[: wires.PAGE_BYTES],
        b"KSWIRE2\0" + GOLDEN.read_bytes()[8:],
        GOLDEN.read_bytes()[:8] + b"\x02" + GOLDEN.read_bytes()[9:],
    ],
    ids=["empty", "zeros", "no ring", "other magic", "other version"],
)
def test_what_is_no_wire_of_this_version_is_refused(content):
    fd = memory(content)
    with pytest.raises(WireError):
        Wire(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("write", "read", "old", "new", "none"),
    [
        (Wire.write_orders, Wire.read_orders, OLD_ORDERS, NEW_ORDERS, Orders()),
        (Wire.write_progress, Wire.read_progress, OLD_PROGRESS, NEW_PROGRESS, Progress()),
    ],
    ids=["orders", "progress"],
)
def test_a_region_torn_anywhere_is_old_new_or_nothing(made, write, read, old, new, none):
    fd, wire = made
    write(wire, old)
    before = os.pread(fd, wires.PAGE_BYTES, 0)
    write(wire, new)
    after = os.pread(fd, wires.PAGE_BYTES, 0)
    differing = [at for at in range(wires.PAGE_BYTES) if before[at] != after[at]]
    outcomes = set()
    for cut in range(differing[0], differing[-1] + 2):
        for first, second in ((after, before), (before, after)):
            os.pwrite(fd, first[:cut] + second[cut:], 0)
            found = read(wire)
            assert found in (old, new, none), cut
            outcomes.add((old, new, none).index(found))
    assert outcomes == {0, 1, 2}


def test_a_torn_seal_is_no_seal(made):
    fd, wire = made
    wire.write_seal(Seal(0, 10, 1, 100, 1, 1, 5))
    wire.write_seal(Seal(1, 20, 2, 100, 1, 1, 6))
    at = 1024 + wires.RECORD_BYTES
    for offset in range(52):
        whole = os.pread(fd, 1, at + offset)
        os.pwrite(fd, bytes([whole[0] ^ 0x10]), at + offset)
        assert [seal.slab for seal in wire.read_seals()] == [0]
        os.pwrite(fd, whole, at + offset)
    assert [seal.slab for seal in wire.read_seals()] == [0, 1]


def test_a_cleared_seal_is_gone_and_its_neighbours_stay(made):
    _, wire = made
    for slab in range(8, 16):
        wire.write_seal(Seal(slab, slab, slab, 1, 1, 1, 1))
    wire.clear_seal(10)
    assert [seal.slab for seal in wire.read_seals()] == [8, 9, 11, 12, 13, 14, 15]


def test_a_torn_record_is_counted_as_lost_and_no_other_is(made):
    fd, wire = made
    for sequence in range(1, 6):
        wire.append(StepRecord(sequence, sequence, 1, 2, 3, 4))
    os.pwrite(fd, b"\xff", wires.PAGE_BYTES + 3 * wires.RECORD_BYTES + 8)
    records, lost = wire.read_since(0)
    assert ([record.sequence for record in records], lost) == ([1, 2, 4, 5], 1)


@settings(max_examples=20)
@given(rounds=st.lists(st.integers(1, 3 * wires.RING_CAPACITY), min_size=1, max_size=4))
def test_every_record_is_read_once_or_counted_as_lost(rounds):
    fd = Wire.create()
    wire = Wire(fd)
    written = read = lost = 0
    for count in rounds:
        for _ in range(count):
            written += 1
            wire.append(StepRecord(written, written, 0, 0, 0, 0))
        records, missed = wire.read_since(read + lost)
        assert [record.sequence for record in records] == list(range(written - len(records) + 1, written + 1))
        read, lost = read + len(records), lost + missed
        assert read + lost == written
    wire.close()
    os.close(fd)


@given(
    st.builds(
        Orders,
        sequence=u64, generation=u32, hold=st.integers(0, 1), snapshot_every=u32, drain_step=u64, restore_step=u64,
        grant=st.integers(-1, 2**31 - 1), restore_slab=st.integers(-1, 99), profile=u32, fingerprint=u32,
    )
)  # fmt: skip
def test_orders_come_back(orders):
    fd = Wire.create()
    wire = Wire(fd)
    wire.write_orders(orders)
    assert wire.read_orders() == orders
    wire.close()
    os.close(fd)


@given(st.builds(Progress, u64, u32, st.integers(0, 4), u32, u64, u64, u64, u64, u64))
def test_progress_comes_back(progress):
    fd = Wire.create()
    wire = Wire(fd)
    wire.write_progress(progress)
    assert wire.read_progress() == progress
    wire.close()
    os.close(fd)


def test_a_reset_forgets_the_worker_and_keeps_orders_and_seals(made):
    _, wire = made
    wire.write_orders(OLD_ORDERS)
    wire.write_progress(OLD_PROGRESS)
    wire.write_seal(Seal(0, 10, 1, 100, 1, 1, 5))
    wire.append(StepRecord(1, 1, 0, 0, 0, 0))
    wire.reset_worker()
    assert (wire.read_progress(), wire.read_since(0)) == (Progress(), ([], 0))
    assert (wire.read_orders(), len(wire.read_seals())) == (OLD_ORDERS, 1)
