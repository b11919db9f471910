"""A rank more than the checkpoint's world had: the mean of what has one, rank 0's of what has none, all verified."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import aggregate
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.manifest import Manifest, build_manifest
from keepstep.checkpoint.restore import CorruptObject, fetch
from keepstep.checkpoint.upload import UploadOrder, measure_slab, upload
from keepstep.ports.store import NotFound, ObjectStore
from keepstep_worker.slab import Place, parse
from tests.support.slabs import file_bytes, memory_file
from tests.support.stores import committed, memory_store

NAME = ManifestName(1, 10, "r")
Tensors = Mapping[str, tuple[str, bytes]]
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "I64": 8, "U8": 1, "F8_E5M2": 1}


def slab_of(tensors: Tensors) -> bytes:
    header, data = {}, b""
    for key, (dtype, content) in tensors.items():
        shape = [len(content) // SIZES[dtype]]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps({"__metadata__": {"format": "keepstep-slab"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + data


def stored(store: ObjectStore, worlds: list[Tensors]) -> Manifest:
    """A checkpoint of these slabs, one a rank."""
    objects, digest = [], ""
    for rank, tensors in enumerate(worlds):
        content = slab_of(tensors)
        fd = memory_file(content)
        done = upload(store, fd, UploadOrder("job", NAME, rank, len(worlds), len(content)))
        os.close(fd)
        objects += done.objects
        digest = done.replicated
    return build_manifest("job", NAME, len(worlds), digest, objects, 1)


def fetched(store: ObjectStore, manifest: Manifest, rank: int) -> bytes:
    fd = memory_file()
    try:
        done = fetch(store, manifest, rank, fd)
        content = file_bytes(fd)
        measured = measure_slab(fd, done.size_bytes)
    finally:
        os.close(fd)
    assert (done.size_bytes, done.replicated, done.local) == (len(content), manifest.digest, measured.local)
    return content


def opened(content: bytes) -> tuple[dict[str, Place], dict[str, str], dict[str, bytes]]:
    places, metadata = parse(content, len(content))
    return places, metadata, {key: content[place.begin : place.end] for key, place in places.items()}


def aggregated(worlds: list[Tensors], rank: int | None = None) -> tuple[dict[str, bytes], list[str]]:
    """What a new rank gets, by key, and the keys that it is told differed."""
    store = memory_store()
    _, metadata, data = opened(fetched(store, stored(store, worlds), len(worlds) if rank is None else rank))
    assert (metadata["format"], metadata["aggregated"]) == ("keepstep-slab", str(len(worlds)))
    return data, json.loads(metadata["differs"])


def floats(code: str, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def ranks(world_size: int, **tensors: tuple[str, list[bytes]]) -> list[Tensors]:
    return [
        {
            "replicated/w": ("U8", b"the same"),
            **{f"local/{key}": (dtype, each[rank]) for key, (dtype, each) in tensors.items()},
        }
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(("dtype", "code"), [("F64", "d"), ("F32", "f"), ("F16", "e"), ("C64", "f")])
def test_floating_point_becomes_the_mean(dtype, code):
    each = [floats(code, 1.0, -2.0, 0.5, 8.0), floats(code, 2.0, 2.0, 0.5, -4.0), floats(code, 6.0, 3.0, 0.5, 2.0)]
    data, differs = aggregated(ranks(3, mean=(dtype, each)))
    assert data["local/mean"] == floats(code, 3.0, 1.0, 0.5, 2.0)
    assert data["replicated/w"] == b"the same"
    assert differs == []


def test_bfloat16_is_the_upper_half_of_a_float_rounded_to_even():
    def bfloats(*values: float) -> bytes:
        return b"".join(struct.pack("<f", value)[2:] for value in values)

    one, two = bfloats(1.0, 4.0, math.inf, 1.0), bfloats(3.0, -2.0, math.inf, 1.0078125)
    data, _ = aggregated(ranks(2, mean=("BF16", [one, two])))
    assert data["local/mean"] == bfloats(2.0, 1.0, math.inf, 1.0)  # halfway between 1 and the next goes to the even one
    odd = bfloats(1.0078125), bfloats(1.015625)
    assert aggregated(ranks(2, mean=("BF16", list(odd))))[0]["local/mean"] == bfloats(1.015625)
    data, _ = aggregated(ranks(2, mean=("BF16", [bfloats(math.nan), bfloats(1.0)])))
    assert math.isnan(struct.unpack("<f", b"\0\0" + data["local/mean"])[0])


def test_what_has_no_mean_is_rank_0s_and_said_to_differ_where_it_does():
    three = ranks(
        3,
        count=("I64", [struct.pack("<q", value) for value in (7, 9, 9)]),
        same=("I64", [struct.pack("<q", 5)] * 3),
        random=("U8", [b"rank 0's", b"rank 0's", b"rank 2's"]),
        tiny=("F8_E5M2", [b"\x01", b"\x02", b"\x03"]),
    )
    data, differs = aggregated(three)
    assert (data["local/count"], data["local/same"]) == (struct.pack("<q", 7), struct.pack("<q", 5))
    assert (data["local/random"], data["local/tiny"]) == (b"rank 0's", b"\x01")
    assert differs == ["local/count", "local/random", "local/tiny"]


def test_all_new_ranks_get_the_same_and_the_old_ones_their_own():
    store = memory_store()
    worlds = ranks(2, mean=("F32", [floats("f", 1.0), floats("f", 2.0)]), random=("U8", [b"a", b"b"]))
    manifest = stored(store, worlds)
    assert [fetched(store, manifest, rank) for rank in (0, 1)] == [slab_of(each) for each in worlds]
    assert fetched(store, manifest, 2) == fetched(store, manifest, 3) == fetched(store, manifest, 63)


def test_one_rank_passes_its_own_on():
    data, differs = aggregated(ranks(1, mean=("F32", [floats("f", 0.1, math.nan)]), random=("U8", [b"a"])))
    assert (data["local/mean"], data["local/random"], differs) == (floats("f", 0.1, math.nan), b"a", [])


def test_tensors_of_another_shape_or_missing_at_a_rank_are_rank_0s():
    worlds = ranks(2, mean=("F32", [floats("f", 1.0), floats("f", 3.0)]))
    worlds[0] = {**worlds[0], "local/alone": ("F32", floats("f", 5.0)), "local/blob": ("U8", b"longer")}
    worlds[1] = {
        "replicated/w": worlds[1]["replicated/w"],
        "local/blob": ("U8", b"short"),
        "local/other": ("U8", b"not at rank 0"),
        "local/mean": worlds[1]["local/mean"],  # and in another order
    }
    data, differs = aggregated(worlds)
    assert data == {
        "replicated/w": b"the same",
        "local/mean": floats("f", 2.0),
        "local/alone": floats("f", 5.0),
        "local/blob": b"longer",
    }
    assert differs == ["local/alone", "local/blob"]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=9))
def test_a_mean_lies_among_its_values_and_equal_values_are_kept(values):
    data, _ = aggregated(ranks(len(values), mean=("F32", [floats("f", value) for value in values])))
    (mean,) = struct.unpack("<f", data["local/mean"])
    assert min(values) <= mean <= max(values)
    assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-6, abs=1e-37)


@given(st.floats(allow_nan=False), st.integers(2, 9))
def test_a_mean_of_equal_doubles_is_exact(value, count):
    data, _ = aggregated(ranks(count, mean=("F64", [floats("d", value, float(rank)) for rank in range(count)])))
    kept, other = struct.unpack("<2d", data["local/mean"])
    assert kept == value
    assert other == pytest.approx((count - 1) / 2)


def test_little_is_held_in_memory_whatever_the_objects_size(monkeypatch):
    """Windows far smaller than the tensors give the same bytes, and no read is larger than a window."""
    big = [os.urandom(40_000), os.urandom(40_000)]
    numbers = [floats("f", *(float(value % 97 + rank) for value in range(9_000))) for rank in range(2)]
    worlds = ranks(2, blob=("U8", big), mean=("F32", numbers), more=("U8", [b"x" * 5_000] * 2))
    expected = aggregated(worlds)
    for name in ("MEMORY_BYTES", "_WINDOW_BYTES_MIN", "_WINDOW_BYTES_MAX"):
        monkeypatch.setattr(aggregate, name, 1000)
    monkeypatch.setattr(aggregate, "_STEP_BYTES", 4096)
    store = memory_store()
    manifest = stored(store, worlds)
    asked: list[tuple[str, int, int | None]] = []

    class Counting:
        def get(self, key: str, start: int = 0, size: int | None = None):
            asked.append((key, start, size))
            return store.get(key, start, size)

    content = fetched(Counting(), manifest, 2)
    assert opened(content)[2] == expected[0]
    local = [(start, size) for key, start, size in asked if "local" in key]
    assert max(size for _, size in local) <= 1001
    assert len(local) == len({(key, start) for key, start, _ in asked if "local" in key})  # each byte once


EDITS = {
    "a flipped bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "a flipped bit in the head": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "cut off": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("what", EDITS)
def test_a_damaged_object_of_any_rank_is_found_and_named(what, place):
    store = memory_store()
    manifest = committed(store, 1, 10, world_size=3)
    key = manifest.objects[place].key
    store.put(key, EDITS[what](b"".join(store.get(key))) or b"")
    with pytest.raises(CorruptObject, match=key):
        fetched(store, manifest, 3)


@pytest.mark.parametrize("place", range(6))
def test_a_missing_object_of_any_rank_is_not_found(place):
    store = memory_store()
    manifest = committed(store, 1, 10, world_size=3)
    store.delete(manifest.objects[place].key)
    with pytest.raises(NotFound, match=manifest.objects[place].key):
        fetched(store, manifest, 3)
