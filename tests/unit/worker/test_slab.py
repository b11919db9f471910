"""A slab is a safetensors file and nothing else; an old one still parses."""

from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_worker.slab import ITEM_BYTES, Blobs, Layout, SlabError, Tensor, Writer, blob, fill, parse, read_blob
from keepstep_worker.slab_view import SlabView

GOLDEN = Path(__file__).parent / "golden" / "slab-v1.safetensors"

specs = st.lists(
    st.tuples(
        st.sampled_from(["replicated/", "local/"]),
        st.text(min_size=1, max_size=12),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ).map(lambda drawn: (drawn[0] + drawn[1], drawn[2], drawn[3])),
    max_size=12,
    unique_by=lambda spec: spec[0],
)


def content(key: str, length: int) -> bytes:
    return (key.encode("utf-8", "surrogatepass") * (length + 1))[:length]


def tensor(key, dtype, shape) -> Tensor:
    return Tensor(key, dtype, shape, lambda target: fill(target, content(key, target.nbytes)))


def written(layout: Layout, tensors: list[Tensor]) -> tuple[int, bytes]:
    fd = os.memfd_create("slab")
    os.ftruncate(fd, layout.size_bytes)
    writer = Writer(fd, layout)
    writer.write(tensors)
    writer.close()
    return fd, os.pread(fd, layout.size_bytes, 0)


def file_of(header: object, data: bytes, pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def test_golden():
    data = GOLDEN.read_bytes()
    places, metadata = parse(data, len(data))
    assert metadata == {"format": "keepstep-slab", "version": "1", "layout": "2085767823"}
    assert {key: (place.dtype, place.shape) for key, place in places.items()} == {
        "replicated/dense/kernel": ("F32", (2, 3)),
        "replicated/dense/bias": ("BF16", (3,)),
        "local/counter": ("I64", ()),
        "local/empty": ("F32", (0, 4)),
        "local/flags": ("BOOL", (3,)),
        "local/notes": ("U8", (64,)),
    }
    raw = {key: data[place.begin : place.end] for key, place in places.items()}
    assert struct.unpack("<6f", raw["replicated/dense/kernel"]) == (0, 1, 2, 3, 4, 5)
    assert struct.unpack("<q", raw["local/counter"]) == (-5,)
    assert raw["local/flags"] == b"\1\0\1"
    assert read_blob(raw["local/notes"]) == b'{"epoch":3}'


def test_a_layout_number_says_what_is_in_it():
    one = [("replicated/a", "F32", (2,)), ("local/b", "I64", ())]
    assert Layout(one).number == Layout(list(one)).number != 0
    numbers = {Layout([("replicated/a", "F32", (2,)), other]).number for other in (("local/b", "I64", (1,)),
               ("local/b", "F64", ()), ("local/c", "I64", ()), ("replicated/b", "I64", ()))}  # fmt: skip
    assert len(numbers | {Layout(one).number}) == 5


@given(specs)
def test_what_was_written_is_read_by_the_rules_of_safetensors(drawn):
    layout = Layout(drawn)
    fd, data = written(layout, [tensor(*spec) for spec in drawn])
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    assert header_bytes % 8 == 0
    assert data[8:9] == b"{"
    spans = sorted(entry["data_offsets"] for key, entry in header.items() if key != "__metadata__")
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]  # no holes
    assert 8 + header_bytes + (spans[-1][1] if spans else 0) == len(data)  # no trailing bytes
    view = SlabView.open(fd, len(data), 7)
    assert sorted(view.keys()) == sorted(key for key, _, _ in drawn)
    for key, dtype, shape in drawn:
        assert view.places[key][1:3] == (dtype, shape)
        assert bytes(view.raw(key)) == content(key, view.raw(key).nbytes)
    classes = [key.partition("/")[0] for key in view.places]
    assert classes == sorted(classes, reverse=True)  # replicated first
    os.close(fd)


def test_a_slab_is_read_when_its_descriptor_was_closed_and_what_replaces_its_bytes_instead_of_them():
    tensors = [tensor("replicated/a", "U8", (3,)), tensor("replicated/b", "U8", (3,))]
    fd, data = written(Layout(each[:3] for each in tensors), tensors)
    view = SlabView.open(fd, len(data), 7).with_bytes({"replicated/a": b"new"})
    os.close(fd)
    assert {key: bytes(view.raw(key)) for key in view.places} == {
        "replicated/a": b"new",
        "replicated/b": content("replicated/b", 3),
    }


def test_a_slab_that_became_shorter_is_not_read():
    tensors = [tensor("replicated/a", "U8", (3,))]
    fd, data = written(Layout(each[:3] for each in tensors), tensors)
    view = SlabView.open(fd, len(data), 7)
    os.ftruncate(fd, len(data) - 1)
    os.close(fd)
    with pytest.raises(SlabError, match="ends within replicated/a"):
        view.sources(["replicated/a"])


@given(specs, st.data())
def test_a_damaged_slab_is_refused_or_reads_as_some_slab(drawn, data):
    layout = Layout(drawn)
    fd, whole = written(layout, [tensor(*spec) for spec in drawn])
    os.close(fd)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    try:
        places, _ = parse(damaged, len(damaged))
    except SlabError:
        return
    assert sum(place.end - place.begin for place in places.values()) <= len(damaged)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "too short"),
        (struct.pack("<Q", 2**63) + b"{}", "header of"),
        (struct.pack("<Q", 3) + b"{}", "header of"),
        (file_of(b"[]", b""), "begin with"),
        (file_of(b"{", b""), "malformed"),
        (file_of(b"{\xff}", b""), "malformed"),
        (file_of(b'{"a":1}', b""), "malformed"),
        (file_of({"a": {"dtype": "F32", "shape": [1]}}, b"1234"), "malformed"),
        (file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b""), "twice"),
        (file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "fill"),
        (file_of({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}, b"1234"), "fill"),
        (file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, b"12345678"), "fill"),
        (file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"12345"), "end at"),
        (file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"123"), "end at"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(file, why):
    with pytest.raises(SlabError, match=why):
        parse(file, len(file))


def test_a_padded_header_is_fine():
    file = file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"1234", pad=5)
    assert parse(file, len(file))[0]["a"].shape == (4,)


@pytest.mark.parametrize(
    ("drawn", "why"),
    [
        ([("weights", "F32", ())], "begins neither"),
        ([("local/a", "F32", ()), ("local/a", "F32", ())], "two tensors"),
        ([("local/a", "F31", ())], "dtype"),
        ([("local/a", "F32", (-1,))], "shape"),
    ],
)
def test_what_can_not_be_laid_out_is_refused(drawn, why):
    with pytest.raises(SlabError, match=why):
        Layout(drawn)


@given(st.binary(max_size=200), st.integers(208, 300))
def test_a_blob_comes_back(payload, capacity):
    target = bytearray(capacity)
    blob("local/x", payload, capacity).write(memoryview(target))
    assert read_blob(target) == payload


def test_a_blob_that_does_not_fit_is_refused_and_so_is_what_is_none():
    with pytest.raises(SlabError, match="do not fit"):
        blob("local/x", b"123456789", 16)
    with pytest.raises(SlabError, match="no blob"):
        read_blob(struct.pack("<Q", 9) + b"12345678")
    with pytest.raises(SlabError, match="no blob"):
        read_blob(b"1234567")


def test_capacity_doubles_and_never_shrinks():
    blobs = Blobs()
    sizes = [blobs.tensor("local/x", b"x" * count).shape[0] for count in (1, 1016, 1017, 5000, 3)]
    assert sizes == [1024, 1024, 2048, 8192, 8192]


def test_a_slab_shorter_than_its_seal_says_is_refused():
    fd = os.memfd_create("slab")
    os.ftruncate(fd, 100)
    with pytest.raises(SlabError, match="can not be mapped"):
        SlabView.open(fd, 200, 1)
    os.close(fd)


def populated(layout: Layout, pieces: int) -> Writer:
    """A writer of touched memory, populated until it was asked so often whether to go on."""
    fd = os.memfd_create("slab")
    os.posix_fallocate(fd, 0, layout.size_bytes)
    writer = Writer(fd, layout)
    os.close(fd)
    asked = iter([True] * pieces)
    writer.populate(lambda: next(asked, False))
    return writer


@pytest.mark.parametrize(("pieces", "is_populated"), [(0, False), (2, True)])
def test_a_copy_into_a_populated_slab_meets_no_page_fault(pieces, is_populated):
    size_bytes = 20_000_000  # of two pieces
    state = tensor("replicated/w", "U8", (size_bytes,))
    layout = Layout([state[:3]])
    content_bytes = content(state.key, size_bytes)
    writer = populated(layout, pieces)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    writer.write([Tensor(*state[:3], lambda target: fill(target, content_bytes))])
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    writer.close()
    pages = size_bytes // resource.getpagesize()
    assert (faults < pages / 10) is is_populated


def test_a_state_of_more_than_four_gibibytes_has_its_last_bytes_in_place():
    """Of the large tensor the last byte alone is written: the rest of the file takes no memory."""
    large = (1 << 32) + 5

    def write_last(target):
        target[-1] = 7

    tensors = [Tensor("replicated/large", "U8", (large,), write_last), tensor("replicated/small", "U8", (3,))]
    layout = Layout(each[:3] for each in tensors)
    fd = os.memfd_create("slab")
    os.ftruncate(fd, layout.size_bytes)
    writer = Writer(fd, layout)
    writer.write(tensors)
    writer.close()
    view = SlabView.open(fd, layout.size_bytes, 1)
    os.close(fd)
    assert view.raw("replicated/large").nbytes == large and view.raw("replicated/large")[-1] == 7
    assert bytes(view.raw("replicated/small")) == content("replicated/small", 3)


def test_a_state_of_a_hundred_thousand_tensors_is_written_and_read():
    tensors = [tensor(f"replicated/layer/{number}/kernel", "F32", ()) for number in range(100_000)]
    fd, data = written(Layout(each[:3] for each in tensors), tensors)
    view = SlabView.open(fd, len(data), 1)
    os.close(fd)
    for number in (0, 1, 50_000, 99_999):
        key = f"replicated/layer/{number}/kernel"
        assert bytes(view.raw(key)) == content(key, 4)
    assert len(view.places) == 100_000
