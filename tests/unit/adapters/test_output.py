"""Cutting a stream of bytes into prefixed lines."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from keepstep.adapters.processes.output import LAST_BYTES, LINE_BYTES_MAX, LineCutter, LineQueue, LineSink, OutputPump

PREFIX = b"[algo-1 rank 0] "


@given(st.lists(st.text(alphabet="a\n\r\0").map(str.encode)))
def test_however_a_stream_is_cut_the_lines_are_the_same(chunks):
    cutter = LineCutter(PREFIX)
    passed = b"".join(cutter.feed(chunk) for chunk in chunks if chunk) + cutter.finish()
    lines = b"".join(chunks).split(b"\n")
    whole = lines[:-1] + ([lines[-1]] if lines[-1] else [])
    assert passed == b"".join(PREFIX + line + b"\n" for line in whole)


def test_only_whole_lines_come_out():
    cutter = LineCutter(PREFIX)
    assert cutter.feed(b"one") == b""
    assert cutter.feed(b" more\ntwo\nthr") == PREFIX + b"one more\n" + PREFIX + b"two\n"
    assert cutter.finish() == PREFIX + b"thr\n"
    assert cutter.finish() == b""


def test_what_is_held_back_is_bounded():
    cutter = LineCutter(PREFIX)
    chunk = b"x" * (LINE_BYTES_MAX // 4)
    assert [len(cutter.feed(chunk)) for _ in range(4)] == [0, 0, 0, len(PREFIX) + LINE_BYTES_MAX + 1]
    assert cutter.finish() == b""


def test_the_end_of_what_was_passed_on_is_remembered():
    passed, write_fd = os.pipe()
    pump = OutputPump(PREFIX, LineSink(write_fd))
    os.write(pump.write_fd, b"early" + b"x" * LAST_BYTES)
    os.write(pump.write_fd, b"\nlast words\n")
    os.close(pump.write_fd)
    assert pump.join(timeout_s=30)
    assert pump.last_words.endswith("x\nlast words\n")
    assert len(pump.last_words) == LAST_BYTES
    for fd in (passed, write_fd):
        os.close(fd)


def test_a_queue_of_lines_never_waits_and_counts_what_it_lost():
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd)
    full = b"x" * 1_000_000  # more than the pipe holds: the writing thread waits
    lines = LineQueue(sink, lines_max=2)
    lines.post(full)
    while not lines.lost_lines:
        lines.post(b"next")
    received = bytearray()
    while received.count(b"\n") < 1:
        received.extend(os.read(read_fd, 65_536))
    assert lines.close(timeout_s=30)
    os.close(write_fd)
    while chunk := os.read(read_fd, 65_536):
        received.extend(chunk)
    os.close(read_fd)
    written = bytes(received).splitlines()
    assert written[0] == full
    assert set(written[1:]) == {b"next"}
    assert sink.lost_bytes == 0
