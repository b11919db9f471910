"""Random streams of a rank that the saved world did not have: its own where streams were apart, shared where shared."""

from __future__ import annotations

import json
import os

import pytest

from keepstep_worker.newcomer import split_streams, to_split
from keepstep_worker.slab import Place
from keepstep_worker.slab_view import SlabView

SEEDED = "local/model/dropout/seed_generator_state"
PHILOX = "local/model/StateVar#2"
NAMED = "local/noise/state"
GLOBAL = "local/random/tensorflow"
PROCESS = "local/keepstep/random/numpy"
KEYS = {"numpy": PROCESS, "python": "local/keepstep/random/python"}
STATES = {
    SEEDED: ("U32", (2,), (1234567).to_bytes(4, "little") + (41).to_bytes(4, "little")),
    f"{SEEDED}@1": ("U32", (2,), (7).to_bytes(4, "little") + (41).to_bytes(4, "little")),
    PHILOX: ("I64", (3,), bytes(range(24))),
    NAMED: ("I64", (3,), bytes(range(24, 48))),
    GLOBAL: ("I64", (2,), bytes(range(16))),
    "local/model/StateVar/of_another_kind": ("I64", (3,), bytes(24)),
    "local/model/StateVar": ("I64", (9,), bytes(72)),  # a generator of a kind that is not known
    "local/model/mean": ("F32", (1,), bytes(4)),
    "replicated/model/StateVar": ("I64", (3,), bytes(24)),
    PROCESS: ("U8", (16,), b"its fingerprints"),
}
GENERATORS = {SEEDED, f"{SEEDED}@1", PHILOX, NAMED, GLOBAL}


def view_of(aggregated: int = 0, differs: object = ()) -> SlabView:
    """A slab with these states; an aggregate over some ranks, unless that is 0."""
    places, data = {}, b""
    for key, (dtype, shape, content) in STATES.items():
        places[key] = Place(key, dtype, shape, len(data), len(data) + len(content))
        data += content
    metadata = {"aggregated": str(aggregated), "differs": json.dumps(list(differs))} if aggregated else {}
    return SlabView(10, places, metadata, memoryview(data))


def changed(view: SlabView) -> set[str]:
    return {key for key, (_, _, content) in STATES.items() if bytes(view.raw(key)) != content}


def test_a_ranks_own_state_is_left_alone():
    view = view_of()
    assert split_streams(view, 5, [NAMED]) is view
    assert to_split(view, KEYS) == []


def test_what_differed_is_split_and_nothing_else():
    view = split_streams(view_of(3, STATES), 5, [NAMED])
    assert changed(view) == GENERATORS
    assert to_split(view, KEYS) == ["numpy"]


def test_what_all_ranks_shared_is_shared_with_the_new_one():
    view = split_streams(view_of(3, [PHILOX]), 5, [NAMED])
    assert changed(view) == {PHILOX}
    assert to_split(view, KEYS) == []


def test_of_a_single_rank_noise_is_split_and_what_orders_the_data_is_not():
    view = split_streams(view_of(1), 5, [NAMED])
    assert changed(view) == GENERATORS
    assert to_split(view, KEYS) == []


def test_counters_stay_and_keys_are_the_ranks_own():
    views = [split_streams(view_of(2, STATES), rank, [NAMED]) for rank in (2, 3, 64)]
    for key in GENERATORS:
        found = [bytes(view.raw(key)) for view in views]
        assert len({*found, STATES[key][2]}) == 4
        at = slice(4, 8) if STATES[key][0] == "U32" else slice(0, -8)
        assert {state[at] for state in found} == {STATES[key][2][at]}
    seeds = [int.from_bytes(bytes(view.raw(SEEDED))[:4], "little") for view in views]
    assert all(0 <= seed < 2**31 for seed in seeds)
    again = split_streams(view_of(2, STATES), 3, [NAMED])
    assert {key: bytes(again.raw(key)) for key in STATES} == {key: bytes(views[1].raw(key)) for key in STATES}


def test_a_slab_with_other_metadata_is_read_from_its_file():
    fd = os.memfd_create("slab")
    header = {"__metadata__": {"aggregated": "2", "differs": json.dumps([GLOBAL])}}
    header[GLOBAL] = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(16)
    os.write(fd, content)
    view = split_streams(SlabView.open(fd, len(content), 10), 2)
    os.close(fd)
    assert bytes(view.raw(GLOBAL))[:8] == bytes(8)
    assert bytes(view.raw(GLOBAL))[8:] != bytes(8)


@pytest.mark.parametrize("malformed", ["", "{", "["])
def test_metadata_that_is_no_list_is_an_error(malformed):
    view = view_of(2)
    view.metadata["differs"] = malformed
    with pytest.raises(ValueError, match="Expecting"):
        split_streams(view, 2)
