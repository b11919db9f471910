from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.safetensors import MalformedSlab, SlabLayout, parse_head_bytes, parse_layout, read_layout
from tests.support.slabs import memory_file, slab_bytes

TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def head(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def layout_of(content: bytes, size: int | None = None) -> SlabLayout:
    fd = memory_file(content)
    try:
        return read_layout(fd, len(content) if size is None else size)
    finally:
        os.close(fd)


def test_regions_are_found():
    content = slab_bytes({"replicated/a": b"12", "replicated/b": b"345", "local/c": b"6789"}, pad=3)
    layout = layout_of(content)
    assert (layout.replicated_bytes, layout.local_bytes) == (5, 4)
    assert content[layout.head_bytes :] == b"123456789"
    assert layout.size_bytes == len(content)


def test_the_file_may_be_longer_than_the_slab():
    content = slab_bytes({"replicated/a": b"12"})
    assert layout_of(content + b"rest of an older one", len(content)).size_bytes == len(content)


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ({}, (0, 0)),
        ({"local/a": b"1"}, (0, 1)),
        ({"replicated/a": b"1"}, (1, 0)),
        ({"local/empty": b"", "replicated/a": b"1", "local/b": b"2", "replicated/empty": b""}, (1, 1)),
    ],
)
def test_regions_may_be_empty(tensors, wanted):
    layout = layout_of(slab_bytes(tensors))
    assert (layout.replicated_bytes, layout.local_bytes) == wanted


def test_types_and_metadata_are_understood():
    header = {
        "__metadata__": {"format": "tf"},
        "replicated/a": TENSOR,
        "local/scalar": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
        "local/half": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [32, 32]},
    }
    assert parse_layout(head(header)) == SlabLayout(len(head(header)), 24, 8)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "header of 0 bytes"),
        (b"{", "header of 1 bytes"),
        (b"[]", "no JSON object"),
        (b"{]", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"local/a": 1, "local/a": 1}', "twice"),
        ({"other/a": TENSOR}, "begins with neither"),
        ({"replicated": TENSOR}, "begins with neither"),
        ({"local/a": 7}, "are wanted"),
        ({"local/a": {"dtype": "F32", "shape": [6]}}, "are wanted"),
        ({"local/a": {**TENSOR, "more": 1}}, "are wanted"),
        ({"local/a": {**TENSOR, "dtype": "F31"}}, "unknown dtype"),
        ({"local/a": {**TENSOR, "dtype": ["F32"]}}, "unknown dtype"),
        ({"local/a": {**TENSOR, "shape": [-2, -3]}}, "non-negative"),
        ({"local/a": {**TENSOR, "shape": [2.0, 3]}}, "non-negative"),
        ({"local/a": {**TENSOR, "shape": [True, 6]}}, "non-negative"),
        ({"local/a": {**TENSOR, "shape": 6}}, "non-negative"),
        ({"local/a": {**TENSOR, "data_offsets": [0]}}, "non-negative"),
        ({"local/a": {**TENSOR, "data_offsets": [24, 0]}}, "does not fill"),
        ({"local/a": {**TENSOR, "data_offsets": [0, 25]}}, "does not fill"),
        ({"local/a": {**TENSOR, "data_offsets": [4, 28]}}, "begins at 4"),
        ({"local/a": TENSOR, "local/b": {**TENSOR, "data_offsets": [20, 44]}}, "begins at 20"),
        ({"local/a": TENSOR, "local/b": {**TENSOR, "data_offsets": [28, 52]}}, "begins at 28"),
        ({"local/a": TENSOR, "replicated/b": {**TENSOR, "data_offsets": [24, 48]}}, "among the replicated"),
        ({"__metadata__": {"a": 1}}, "strings"),
        ({"__metadata__": []}, "strings"),
    ],
)
def test_what_is_no_slab_is_refused(header, why):
    with pytest.raises(MalformedSlab, match=why):
        parse_layout(head(header))


def test_a_length_that_can_not_be_is_refused():
    with pytest.raises(MalformedSlab, match="too few"):
        parse_head_bytes(b"\x10\0\0")
    with pytest.raises(MalformedSlab, match="can not be"):
        parse_head_bytes(b"\xff" * 8)
    with pytest.raises(MalformedSlab, match="says"):
        parse_layout(head({}) + b"x")


def test_a_slab_that_is_cut_off_is_refused_wherever_it_is_cut():
    content = slab_bytes({"replicated/a": b"12", "local/b": b"34"})
    for length in range(len(content)):
        with pytest.raises(MalformedSlab):
            layout_of(content[:length])
        with pytest.raises(MalformedSlab):
            layout_of(content[:length], len(content))
    with pytest.raises(MalformedSlab, match="the slab at"):
        layout_of(content + b"5")


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(content):
    try:
        layout = layout_of(content)
    except MalformedSlab:
        return
    assert layout.size_bytes == len(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["local/a", "replicated/a", "__metadata__", "x"]), json_values, max_size=4))
def test_no_header_breaks_the_parser(header):
    try:
        parse_layout(head(header))
    except MalformedSlab:
        return
    assert "x" not in header
