"""A large state is copied by several threads, each byte once."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from keepstep_worker import shares
from keepstep_worker.slab import Layout, Reader, SlabError, Tensor, Writer, hold
from keepstep_worker.slab_view import SlabView
from keepstep_worker.streaming import Source


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    monkeypatch.setattr(shares, "SHARE_BYTES", 100)
    monkeypatch.setattr(shares, "_threads", lambda: 4)


def tensors_of(sizes, write=None):
    def writes(number, size):
        def fill(target):
            target[:] = bytes([number % 251]) * size

        return fill

    return [
        Tensor(f"replicated/{number:04}", "U8", (size,), write or writes(number, size))
        for number, size in enumerate(sizes)
    ]


def written(tensors):
    layout = Layout((each.key, each.dtype, each.shape) for each in tensors)
    fd = os.memfd_create("slab")
    os.ftruncate(fd, layout.size_bytes)
    writer = Writer(fd, layout)
    try:
        writer.write(tensors)
        return SlabView.open(fd, layout.size_bytes, 1)
    finally:
        writer.close()
        os.close(fd)


@pytest.mark.parametrize("sizes", [[1], [99, 1], [1000], [10] * 300, [1000, 1, 1, 1, 3000, 2], [0, 0, 500, 0]])
def test_every_tensor_is_copied_to_its_place(sizes):
    view = written(tensors_of(sizes))
    for number, size in enumerate(sizes):
        assert bytes(view.raw(f"replicated/{number:04}")) == bytes([number % 251]) * size


def test_several_threads_take_part():
    seen = set()
    together = threading.Barrier(4)

    def write(target):
        together.wait(60)  # passes only if four write at the same time
        seen.add(threading.get_ident())

    written(tensors_of([100] * 4, write))
    assert len(seen) == 4


@pytest.mark.parametrize("at", range(4))
def test_what_fails_is_told_once_all_have_ended(at):
    ended = []

    def writes(number):
        def write(target):
            ended.append(number)
            if number == at:
                raise ValueError("no such variable")

        return write

    with pytest.raises(ValueError, match="no such variable"):
        written([Tensor(f"replicated/{number}", "U8", (100,), writes(number)) for number in range(4)])
    assert sorted(ended) == [0, 1, 2, 3]


class Things:
    """Numbers that are read together; each has its number in all of its bytes."""

    def __init__(self, can_hold=True):
        self.calls, self.can_hold = [], can_hold
        self.reader = Reader(self.read, self.hold)

    def read(self, things):
        self.calls.append(("read", len(things)))
        for thing in things:
            data = bytearray([thing["value"]]) * thing.get("size", 60)
            yield Source(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), data)

    def hold(self, things):
        self.calls.append(("hold", len(things)))
        return [self.write_of(thing["value"]) for thing in things] if self.can_hold else None

    @staticmethod
    def write_of(value):
        def write(target):
            target[:] = bytes([value]) * target.nbytes

        return write

    def tensors(self, count):
        self.all = [{"value": number} for number in range(count)]
        return [
            Tensor(f"replicated/{number}", "U8", (60,), lambda target: pytest.fail("alone"), None, thing, self.reader)
            for number, thing in enumerate(self.all)
        ]


def test_what_has_a_reader_is_read_together_and_the_rest_one_by_one():
    things, others = Things(), Things()
    alone = [tensor._replace(key=f"local/{tensor.key[11:]}") for tensor in tensors_of([50, 50])]
    apart = [tensor._replace(key=f"local/other/{number}") for number, tensor in enumerate(others.tensors(2))]
    view = written([*things.tensors(7)[:3], *alone, *apart, *things.tensors(7)[3:]])
    assert things.calls == [("read", 7)]
    assert others.calls == [("read", 2)]
    for number in range(7):
        assert bytes(view.raw(f"replicated/{number}")) == bytes([number]) * 60
    assert bytes(view.raw("local/0001")) == bytes([1]) * 50
    assert bytes(view.raw("local/other/1")) == bytes([1]) * 60


def test_what_is_held_together_is_of_that_moment():
    things = Things()
    held = hold([*things.tensors(3), Tensor("local/x", "U8", (1,), lambda target: None, lambda: Things.write_of(9))])
    for thing in things.all:
        thing["value"] = 200
    view = written(held)
    assert things.calls == [("hold", 3)]
    assert [view.raw(f"replicated/{number}")[0] for number in range(3)] == [0, 1, 2]
    assert view.raw("local/x")[0] == 9


def test_nothing_is_held_where_one_can_not_be():
    assert hold(Things(can_hold=False).tensors(2)) is None
    assert hold([*Things().tensors(2), Tensor("local/x", "U8", (1,), lambda target: None)]) is None


def test_what_fails_while_it_is_read_is_told_once_all_have_ended():
    things = Things()

    def read(sources):
        yield from things.read(sources[:2])
        raise ValueError("no such variable")

    tensors = [tensor._replace(reader=Reader(read, things.hold)) for tensor in things.tensors(5)]
    with pytest.raises(ValueError, match="no such variable"):
        written(tensors)


def test_bytes_of_another_size_than_their_place_are_not_written():
    things = Things()
    tensors = things.tensors(3)
    things.all[1]["size"] = 61
    with pytest.raises(SlabError, match="'replicated/1' has 61 bytes, its place 60"):
        written(tensors)
