"""What is written can be read, exactly; and no difference escapes the digest."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core import codec
from keepstep.core.actions import StopWorker, SweepStore
from keepstep.core.events import Event
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.records import Record
from keepstep.core.state import Decision, Note, State
from keepstep.core.values import evolve
from keepstep.core.view import Cluster
from tests.unit.core.values import a_job

EVENTS, RECORDS = get_args(Event), get_args(Record)
STATE = State(a_job(), Policy(), 1_000.0)


def values_of(hint: object) -> st.SearchStrategy:
    """Any value of a type of the core, every field drawn."""
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if is_dataclass(hint):
        return st.builds(hint, **{name: values_of(part) for name, part in get_type_hints(hint).items()})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of(*(values_of(part) for part in parts))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple and parts[-1] is ...:
        return st.lists(values_of(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(part) for part in parts))
    return st.from_type(hint)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_record_comes_back_as_it_was(kind, data):
    record = data.draw(values_of(kind))
    assert codec.decode_record(codec.encode_record(record)) == record


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_event_comes_back_as_it_was(kind, data):
    event = data.draw(values_of(kind))
    plain = json.loads(codec.encode_event(event))
    assert codec.decode_event(plain) == event
    assert repr(codec.decode_event(plain)) == repr(event)


def test_kinds_are_told_apart_by_their_kind():
    assert len({kind.kind if hasattr(kind, "kind") else "" for kind in EVENTS}) == len(EVENTS)
    kinds = [next(field.default for field in fields(kind) if field.name == "kind") for kind in (*EVENTS, *RECORDS)]
    assert len(set(kinds)) == len(EVENTS) + len(RECORDS)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "node"}', '{"kind": "planet"}', '{"kind": "leader", "host": 3, "node_id": []}']
)
def test_what_is_no_record_is_refused(text):
    with pytest.raises(codec.Undecodable):
        codec.decode_record(text)


@pytest.mark.parametrize("value", [None, 3, {}, {"kind": "timer_will_fire"}, {"kind": "lease_granted", "lease": "x"}])
def test_what_is_no_event_is_refused(value):
    with pytest.raises(codec.Undecodable):
        codec.decode_event(value)


def test_a_job_comes_back_as_it_was():
    assert codec.decode_job(codec.encode_job(a_job())) == a_job()


def digest(state: State = STATE, *, event: str = "", now: float = 1.0, actions: tuple = ()) -> str:
    return codec.digest_of(event, now, Decision(state, actions, (Note(Reason.NOTHING_TO_DO),)))


@pytest.mark.parametrize("name", [f.name for f in fields(State) if f.name not in ("job", "policy", "cluster")])
def test_no_change_of_the_state_escapes_the_digest(name):
    assert digest(evolve(STATE, **{name: "something else"})) != digest()


@pytest.mark.parametrize("name", [field.name for field in fields(Cluster)])
def test_no_change_of_the_cluster_escapes_the_digest(name):
    assert digest(evolve(STATE, cluster=evolve(STATE.cluster, **{name: "something else"}))) != digest()


def test_words_that_are_kept_change_no_digest():
    digests = codec.Digests()
    for state in (STATE, evolve(STATE, completed=7), STATE, evolve(STATE, cluster=evolve(STATE.cluster, watched=9))):
        assert digests.of("", 1.0, Decision(state, (), ())) == codec.digest_of("", 1.0, Decision(state, (), ()))


def test_no_change_of_event_time_or_actions_escapes_the_digest():
    stop, sweep = StopWorker("one.0"), SweepStore(3)
    seen = [
        digest(),
        digest(event='{"kind":"timer_fired"}'),
        digest(now=2.0),
        digest(actions=(stop,)),
        digest(actions=(stop, sweep)),
        digest(actions=(sweep, stop)),
        digest(actions=(StopWorker("one.1"),)),
    ]
    assert len(set(seen)) == len(seen)
    assert digest() == digest()
