"""Copies of all small sizes and alignments, and a large one, compiled in all ways, and not.

What lies beside stays as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from pathlib import Path

from keepstep_worker import streaming
from keepstep_worker.streaming import Source

BEFORE = 128
LARGE = (16_383, 16_384, 16_448, 40_000, 1 << 20, (3 << 20) + 77)


def source_of(data: bytearray) -> Source:
    return Source(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), data)


def copied(size: int, to: int, from_: int) -> bool:
    source, target = bytearray(os.urandom(from_ + size)), bytearray(os.urandom(BEFORE + size + to + BEFORE))
    expected = bytearray(target)
    begin = BEFORE + to
    expected[begin : begin + size] = source[from_:]
    whole = source_of(source)
    part = Source(whole.address + from_, size, source)
    streaming.copy(memoryview(target)[begin : begin + size], part)
    return target == expected


def are_copied_together(sizes: list[int]) -> bool:
    """Blocks that several threads share, the large ones among them too."""
    sources, targets = [bytearray(os.urandom(size)) for size in sizes], [bytearray(size) for size in sizes]
    with streaming.Copying(streaming.pieces_in(sizes)) as copying:
        for source, target in zip(sources, targets, strict=True):
            copying.give(source_of(target).address, source_of(source))
    return sources == targets


class Held(bytearray):
    """Bytes of which it can be told whether anybody holds them."""


def are_left(sizes: list[int], share: float) -> bool:
    """Of blocks that are given, the first ones are there when the context is left, the others when it is finished.

    As long as they are not, they are held.
    """
    sources, targets = [Held(os.urandom(size)) for size in sizes], [bytearray(size) for size in sizes]
    expected, held = [bytes(source) for source in sources], [weakref.ref(source) for source in sources]
    with streaming.Copying(streaming.pieces_in(sizes)) as copying:
        done = copying.give_each([(source_of(target).address, len(target)) for target in targets], sources)
        copying.leave(int(sum(sizes) * share))
        sources.clear()
    copying.let_go()
    left, at_once = copying.left_bytes, len(sizes)
    while left > 0:
        at_once -= 1
        left -= sizes[at_once]
    as_asked = left == 0 and (copying.left_bytes > 0) is (share > 0) and (at_once > 0) is (share < 1)
    early = expected[:at_once] == targets[:at_once] and not any(each() for each in held[:at_once])
    late = all(each() is not None for each in held[at_once:])
    copying.finish()
    return done == len(sizes) and as_asked and early and late and expected == targets


def is_told(wrong: object) -> bool:
    """Of objects that are given together, those before one that can not be, and no others."""
    sources, targets = [bytearray(b"123"), bytearray(), wrong, bytearray(b"456")], [bytearray(3) for _ in range(4)]
    ranges = [(source_of(target).address, size) for target, size in zip(targets, (3, 0, 3, 3), strict=True)]
    with streaming.Copying(4) as copying:
        done = copying.give_each(ranges, sources)
        rest = copying.give_each(ranges[3:], sources[3:])
    return (done, rest) == (2, 1) and targets == [b"123", bytes(3), bytes(3), b"456"]


def refuses(target: memoryview) -> bool:
    try:
        streaming.copy(target, source_of(bytearray(8)))
    except (TypeError, ValueError):
        return True
    return False


def main() -> None:
    compiled, gives = streaming._stream(), streaming._give()
    ways = [(compiled, way) for way in range(3 if b"avx512f" in Path("/proc/cpuinfo").read_bytes().split() else 2)]
    for function, way in (*ways, (None, 0)):
        streaming._stream = lambda function=function: function  # type: ignore[assignment]
        streaming._give = lambda function=function: gives if function is not None else None  # type: ignore[assignment]
        streaming._way = lambda way=way: way  # type: ignore[assignment]
        wrong = [(size, at) for size in range(1, 300) for at in range(0, 64, 7) if not copied(size, at, 63 - at)]
        wrong += [(size, at) for size in LARGE for at in (0, 1, 63) if not copied(size, at, 64 - at)]
        refused = refuses(memoryview(bytearray(9))) and refuses(memoryview(bytes(8)))
        together = are_copied_together([1, 70_000, (9 << 20) + 13, *range(2, 400)])
        left = all(
            are_left([1, 70_000, *[400_000] * 40, (9 << 20) + 13, 5], each / 5) for each in range(6) for _ in "123"
        )
        told = all(is_told(each) for each in (b"12", b"1234", "123", None, memoryview(b"123456")[::2]))
        named = ("in fours", "straight", "by whole lines")[way] if function is not None else "plain"
        found = {"way": named, "wrong": wrong, "refused": refused, "together": together, "left": left, "told": told}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
