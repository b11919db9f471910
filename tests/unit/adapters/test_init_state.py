"""What init tells an agent about the one before it."""

from __future__ import annotations

import json

import pytest

from keepstep.adapters.init_link import InitLinkError, InitState, Kept, parse_state

WHOLE = {
    "boot": 2,
    "kept": {"slab/0": {"fd": 9, "meta": {"layout": 1}}},
    "memo": {"lease": 5},
    "companions": {"etcd": 77},
    "signals": [15],
}


def test_a_state_is_read():
    expected = InitState(2, {"slab/0": Kept(9, {"layout": 1})}, {"lease": 5}, {"etcd": 77}, (15,))
    assert parse_state(json.dumps(WHOLE)) == expected


@pytest.mark.parametrize("name", WHOLE)
def test_a_state_that_lacks_something_is_refused(name):
    with pytest.raises(InitLinkError, match="KEEPSTEP_INIT_STATE"):
        parse_state(json.dumps({key: value for key, value in WHOLE.items() if key != name}))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"boot": "x"}', json.dumps({**WHOLE, "kept": {"a": 1}})])
def test_nonsense_is_refused(text):
    with pytest.raises(InitLinkError, match="KEEPSTEP_INIT_STATE"):
        parse_state(text)
