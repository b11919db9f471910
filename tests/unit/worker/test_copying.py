"""A large state is copied by several threads, each byte once."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading

import pytest

from keepstep_worker import shares
from keepstep_worker.slab import Layout, Reader, SlabError, Tensor, Writer
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


def source_of(data):
    return Source(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), data)


class Things:
    """Numbers that are read together; each has its number in all of its bytes."""

    def __init__(self):
        self.calls = []
        self.reader = Reader(self.read, source_of, lambda: True)

    def read(self, things):
        self.calls.append(0)
        for thing in things:
            self.calls[-1] += 1
            yield [bytearray([thing["value"]]) * thing.get("size", 60)]

    def tensors(self, count):
        self.all = [{"value": number} for number in range(count)]
        return [
            Tensor(f"replicated/{number}", "U8", (60,), lambda target: pytest.fail("alone"), thing, self.reader)
            for number, thing in enumerate(self.all)
        ]


def test_what_has_a_reader_is_read_together_and_the_rest_one_by_one():
    things, others = Things(), Things()
    alone = [tensor._replace(key=f"local/{tensor.key[11:]}") for tensor in tensors_of([50, 50])]
    apart = [tensor._replace(key=f"local/other/{number}") for number, tensor in enumerate(others.tensors(2))]
    view = written([*things.tensors(7)[:3], *alone, *apart, *things.tensors(7)[3:]])
    assert things.calls == [3, 4], "those that stand together"
    assert others.calls == [2]
    for number in range(7):
        assert bytes(view.raw(f"replicated/{number}")) == bytes([number]) * 60
    assert bytes(view.raw("local/0001")) == bytes([1]) * 50
    assert bytes(view.raw("local/other/1")) == bytes([1]) * 60


def test_what_fails_while_it_is_read_is_told_once_all_have_ended():
    things = Things()

    def read(sources):
        yield from things.read(itertools.islice(sources, 2))
        raise ValueError("no such variable")

    reader = Reader(read, pytest.fail, lambda: True)
    tensors = [tensor._replace(reader=reader) for tensor in things.tensors(5)]
    with pytest.raises(ValueError, match="no such variable"):
        written(tensors)


def test_what_was_not_read_is_not_taken_for_copied():
    things = Things()
    reader = Reader(lambda sources: things.read(itertools.islice(sources, 2)), pytest.fail, lambda: True)
    with pytest.raises(SlabError, match="'replicated/2' was not read"):
        written([tensor._replace(reader=reader) for tensor in things.tensors(5)])


def test_more_than_there_is_to_read_is_not_written():
    things = Things()
    reader = Reader(lambda sources: [[bytearray(60) for _ in sources] + [bytearray(60)]], pytest.fail, lambda: True)
    with pytest.raises(SlabError, match="1 more were read than there are"):
        written([tensor._replace(reader=reader) for tensor in things.tensors(3)])


def test_bytes_of_another_size_than_their_place_are_not_written():
    things = Things()
    tensors = things.tensors(3)
    things.all[1]["size"] = 61
    with pytest.raises(SlabError, match="'replicated/1' has 61 bytes, its place 60"):
        written(tensors)
