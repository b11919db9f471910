"""A large state is copied by several threads, each byte once."""

from __future__ import annotations

import os
import threading

import pytest

from keepstep_worker import shares
from keepstep_worker.slab import Layout, Tensor, Writer
from keepstep_worker.slab_view import SlabView


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    monkeypatch.setattr(shares, "_SHARE_BYTES", 100)
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
