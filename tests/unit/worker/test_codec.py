"""Small values come back as they were, and nothing that is read can run code."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_worker import codec

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


def same(one: object, other: object) -> bool:
    return type(one) is type(other) and (
        len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
        if isinstance(one, (list, tuple))
        else one == other
    )


@given(values)
def test_what_was_kept_comes_back(value):
    assert same(codec.loads(codec.dumps(value)), value)


@given(st.dictionaries(st.text().filter(lambda key: key != "$"), values))
def test_a_dictionary_of_what_is_encoded_already_is_the_same_bytes(whole):
    assert codec.join({key: codec.dumps(value) for key, value in whole.items()}) == codec.dumps(whole)


def test_what_is_no_number_or_beyond_numbers_comes_back():
    found = codec.loads(codec.dumps([math.nan, math.inf, -math.inf, -0.0, 2**200]))
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 0.0, 2**200]
    assert math.copysign(1, found[3]) == -1


def test_a_random_state_comes_back():
    generator = random.Random(5)
    saved = codec.loads(codec.dumps(generator.getstate()))
    drawn = [generator.random() for _ in range(3)]
    other = random.Random()
    other.setstate(saved)
    assert [other.random() for _ in range(3)] == drawn


@pytest.mark.parametrize(
    "value",
    [
        deque([1, (2, "x")], maxlen=3), deque(), OrderedDict([("b", 1), ((2,), [3])]), Counter("abca"),
        defaultdict(list, {"a": [1], 2: []}), defaultdict(int), {"losses": deque([1.5], 2)},
    ],
)  # fmt: skip
def test_the_collections_of_the_standard_library_come_back(value):
    found = codec.loads(codec.dumps(value))
    assert found == value and type(found) is type(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)


class Anything:
    """Of no kind that the codec knows."""


@pytest.mark.parametrize(
    "value", [Anything(), [Anything()], {"a": Anything}, lambda: 0, 1j, range(3), defaultdict(Anything)]
)
def test_what_can_not_be_kept_is_refused(value):
    with pytest.raises(codec.CodecError, match="can not be kept"):
        codec.dumps(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"$":"os.system","items":[]}',
        b'{"$":"tuple"}',
        b'{"$":"tuple","items":3}',
        b'{"$":"bytes","data":"%%"}',
        b'{"$":"dict","items":[[1]]}',
        b'{"$":["tuple"],"items":[]}',
        b'{"$":"dict","items":[[[],1]]}',
        b'{"$":"defaultdict","items":[],"factory":"open"}',
        b'{"$":"deque","items":[1]}',
    ],
)
def test_what_was_not_kept_by_it_is_refused(data):
    with pytest.raises(ValueError):
        codec.loads(data)


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=5))
def test_it_is_json(value):
    assert json.loads(codec.dumps(value)) is not None
