"""What the kernel is asked to do with pages: which are to be huge, mapping in and out, and nothing else changes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import re
from pathlib import Path

import pytest

from keepstep_worker import pages
from keepstep_worker.slab import Reader, Tensor, fill
from tests.support.fake_agent import FakeAgent, eventually

HUGE = 2 << 20
AT = 100 * HUGE


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),
        ([(AT, HUGE)], [(AT, HUGE)]),
        ([(AT, HUGE - 1)], []),
        ([(AT + 1, 2 * HUGE)], [(AT + HUGE, HUGE)]),
        ([(AT, HUGE // 2), (AT + HUGE // 2 + 64, HUGE // 2 - 64)], [(AT, HUGE)]),
        ([(AT, HUGE // 2), (AT + HUGE // 2 + 70_000, HUGE)], []),
        ([(AT + HUGE, HUGE), (AT + 4 * HUGE, 3 * HUGE), (AT, HUGE)], [(AT, 2 * HUGE), (AT + 4 * HUGE, 3 * HUGE)]),
        ([(AT, 3 * HUGE), (AT + 100, 100), (AT + HUGE, 0), (0, 0)], [(AT, 3 * HUGE)]),
    ],
)
def test_what_lies_close_together_makes_up_whole_huge_pages(ranges, expected):
    assert list(pages.in_huge_pages(ranges)) == expected


class Memory:
    """Private memory in which every page has other bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.data = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data[:] = self.content = random.Random(1).randbytes(size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self.range = self.address, size_bytes

    @property
    def huge_bytes(self) -> int:
        """How much of it, and of what the kernel has joined it with, lies in huge pages."""
        for entry in Path("/proc/self/smaps").read_text().split("VmFlags:"):
            bounds = re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", entry, re.MULTILINE)
            if bounds and int(bounds[1], 16) <= self.address + HUGE < int(bounds[2], 16):
                return int(re.search(r"^AnonHugePages: +(\d+) kB", entry, re.MULTILINE)[1]) << 10
        raise AssertionError("it is mapped nowhere")


def can_collapse() -> bool:
    memory = Memory(3 * HUGE)
    begin = -(-memory.address // HUGE) * HUGE
    return not pages._are_off() and pages._advise(begin, HUGE, pages._COLLAPSE) == 0


@pytest.mark.skipif(not can_collapse(), reason="this machine's kernel, or its settings, have no MADV_COLLAPSE")
def test_memory_in_use_comes_to_lie_in_huge_pages_with_what_it_holds():
    memory = Memory(40 << 20)
    pages.enlarge([memory.range], lambda: False)
    before = memory.huge_bytes
    pages.enlarge([memory.range], lambda: True)
    assert (before, memory.huge_bytes) == (0, 19 * HUGE if memory.address % HUGE else 20 * HUGE)
    assert memory.data[:] == memory.content


@pytest.fixture
def asked(monkeypatch):
    """What the kernel is asked for, and refuses."""
    found = []
    monkeypatch.setattr(pages, "_are_off", lambda: False)
    monkeypatch.setattr(pages, "_advise", lambda *what: found.append(what) or errno.EINVAL)
    return found


def test_an_older_kernel_is_told_for_later(asked):
    pages.enlarge([(AT, 20 << 20)], lambda: True)
    first, second = (AT, 16 << 20), (AT + (16 << 20), 4 << 20)
    assert asked == [(*first, 14), (*first, 25), (*second, 14), (*second, 25)]


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EBUSY])
def test_where_memory_is_in_small_pieces_it_is_given_up(asked, monkeypatch, error):
    monkeypatch.setattr(pages, "_advise", lambda *what: asked.append(what) or error)
    pages.enlarge([(AT, 200 << 20)], lambda: True)
    assert len(asked) == 6


def test_a_machine_that_is_to_have_none_is_asked_for_none(asked, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(pages, "_advise", lambda *what: asked.append(what) or 0)
    for text in ("always madvise [never]\n", None):
        choice = tmp_path / f"enabled-{text is None}"
        if text:
            choice.write_text(text)
        monkeypatch.setattr(pages, "_CHOICE", choice)
        pages.enlarge([(AT, HUGE)], lambda: True)
    assert asked == []
    choice.write_text("always [madvise] never\n")
    pages.enlarge([(AT, HUGE)], lambda: True)
    assert len(asked) == 2


class State:
    """Three tensors that are read where they lie; the last one lies elsewhere each time."""

    def __init__(self) -> None:
        self.lying = [ctypes.create_string_buffer(100) for _ in range(2)]
        self.moving: list[ctypes.Array[ctypes.c_char]] = []
        self.reader = Reader(self.read, pytest.fail, lambda: False)

    def read(self, things):
        self.moving.append(ctypes.create_string_buffer(100))
        buffers = [*self.lying, self.moving[-1]]
        return [[buffers[thing] for thing in things]]

    def tensors(self) -> list[Tensor]:
        return [Tensor(f"replicated/{n}", "U8", (100,), lambda target: None, n, self.reader) for n in range(3)]


def test_what_a_second_snapshot_finds_where_it_was_is_made_to_lie_in_huge_pages_once(monkeypatch):
    found, state, agent = [], State(), FakeAgent()
    monkeypatch.setattr(pages, "enlarge", lambda ranges, go_on: found.append((sorted(ranges), go_on())))
    session = agent.session(snapshot_every=1)
    session.set_provider(state.tensors)
    session.announce()
    slabs = session._slabs
    eventually(lambda: not slabs.awaited or session._poll())
    for step in range(1, 5):
        agent.settle()
        eventually(lambda: slabs.granted(session._orders().grant, slabs.layout_number, prepared=True) is not None)
        session.enter_step(step)
        session.complete_step(step)
        assert len(state.moving) == step
        assert (slabs._enlargement is not None) is (step > 1)
    eventually(lambda: found)
    agent.close()
    assert found == [(sorted((ctypes.addressof(each), 100) for each in state.lying), True)]


def mapped_in(address: int) -> int:
    """Bytes of the mapping at an address that this process has mapped in."""
    entry = next(each for each in Path("/proc/self/smaps").read_text().split("VmFlags:") if f"\n{address:x}-" in each)
    return int(re.search(r"^Rss: +(\d+) kB", entry, re.MULTILINE)[1]) << 10


def test_pages_of_a_file_are_mapped_out_and_are_there_again_for_whoever_reads_them():
    fd = os.memfd_create("file")
    os.write(fd, content := random.Random(2).randbytes((33 << 20) + 5))
    with mmap.mmap(fd, len(content)) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert mapped[:] == content
        before = mapped_in(address)
        pages.map_out(address, len(content))
        assert (before >= len(content), mapped_in(address)) == (True, 0)
        assert mapped[:] == content
    os.close(fd)


def test_pages_of_a_file_are_mapped_in_before_anybody_reads_them():
    fd = os.memfd_create("file")
    os.write(fd, content := random.Random(3).randbytes((33 << 20) + 5))
    with mmap.mmap(fd, len(content), prot=mmap.PROT_READ) as mapped, memoryview(mapped) as memory:
        address, size_bytes = pages.range_of(memory)
        before = mapped_in(address)
        pages.map_in(address, size_bytes, lambda: True)
        assert (before, mapped_in(address) >= len(content)) == (0, True)
        assert ctypes.string_at(address, len(content)) == content
    os.close(fd)


def test_a_worker_maps_in_what_it_will_restore_before_its_script_asks_for_it():
    agent = FakeAgent()
    session = agent.session(snapshot_every=1)
    session.join("loop")
    session.set_provider(lambda: [Tensor("replicated/large", "U8", (5 << 20,), lambda to: fill(to, bytes(5 << 20)))])
    session.enter_step(1)
    session.complete_step(1)
    agent.wait_for("sealed")
    session = agent.session(restore_slab=agent.newest().slab, restore_step=1)
    ahead = session._slabs._ahead[1]
    eventually(lambda: mapped_in(pages.range_of(ahead.memory)[0]) >= 5 << 20)
    session.join("loop")
    assert session.restored() is ahead
    agent.close()
