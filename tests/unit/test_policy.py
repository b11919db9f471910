"""A policy is a value: amounts parse and show exactly, contradictions are named, rules answer, JSON gives it back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from keepstep.core.causes import FailureCause
from keepstep.core.knobs import parse_encryption, parse_store
from keepstep.core.policy import Policy
from keepstep.core.quantities import (
    Cadence,
    RestartBudget,
    parse_budget,
    parse_cadence,
    parse_rate,
    parse_seconds,
    parse_steps,
    parse_steps_or,
    show_budget,
    show_cadence,
    show_rate,
    show_seconds,
)

KNOBS_MAX = 58


def refusal(values: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        Policy.model_validate(values)
    return str(caught.value)


def knobs(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from knobs(field.annotation, f"{prefix}{name}.")
        else:
            extra = field.json_schema_extra
            shown = extra if isinstance(extra, dict) else {}
            yield prefix + name, {**shown, "description": field.description, "required": field.is_required()}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0.0), ("500ms", 0.5), ("5s", 5.0), ("1.5 s", 1.5), (" 2min ", 120.0), ("1h", 3600.0), ("0.5h", 1800.0)],
)
def test_a_duration_says_its_unit(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", 5, 5.0, None, True, "5 parsecs", "-5s", "5m", "s", "1h 5min", "1e3s", "٥s", "nan s", "5s\n6s"]
)
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="a duration with its unit"):
        parse_seconds(text)


@given(
    whole=st.integers(min_value=0, max_value=8_784),
    part=st.integers(min_value=0, max_value=999_999_999),
    unit=st.sampled_from(["ms", "s", "min", "h"]),
)
def test_a_shown_duration_parses_to_the_same_one(whole, part, unit):
    assume((whole, unit) != (8_784, "h"))
    seconds = parse_seconds(f"{whole}.{part:09}{unit}")
    assert parse_seconds(show_seconds(seconds)) == seconds


@pytest.mark.parametrize("text", ["8785h", "999999999h", "31622401s"])
def test_a_duration_ends_within_a_year(text):
    with pytest.raises(ValueError, match="a year at most"):
        parse_seconds(text)


@given(st.integers(min_value=1, max_value=10**12 - 1))
def test_a_shown_cadence_in_steps_parses_to_the_same_one(steps):
    cadence = Cadence(steps=steps)
    assert parse_cadence(show_cadence(cadence)) == cadence


@given(count=st.integers(min_value=0, max_value=999_999), window_s=st.integers(min_value=1, max_value=10**7))
def test_a_shown_budget_parses_to_the_same_one(count, window_s):
    budget = RestartBudget(count, float(window_s))
    assert parse_budget(show_budget(budget)) == budget


@pytest.mark.parametrize(("text", "steps"), [("1 step", 1), ("10 steps", 10), ("10steps", 10)])
def test_steps(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["0 steps", "-1 steps", "10", 10, "1.5 steps", "ten steps", None])
def test_what_is_no_number_of_steps(text):
    with pytest.raises(ValueError, match="a number of steps"):
        parse_steps(text)


@pytest.mark.parametrize("word", ["auto", "off"])
def test_a_word_stands_for_no_steps(word):
    parse = parse_steps_or(word)
    assert (parse(word), parse("3 steps")) == (None, 3)
    with pytest.raises(ValueError, match=f"{word}, or a number of steps"):
        parse("sometimes")


def test_a_cadence_is_steps_or_time_or_left_to_keepstep():
    assert parse_cadence("auto") == Cadence()
    assert parse_cadence("500 steps") == Cadence(steps=500)
    assert parse_cadence("2min") == Cadence(seconds=120.0)
    for text in ("never", "0 steps", "0s", "999ms", 500, None):
        with pytest.raises(ValueError):
            parse_cadence(text)


def test_a_budget_is_a_count_in_a_window():
    assert parse_budget("8 per 1h") == RestartBudget(8, 3600.0)
    assert parse_budget("0 per 10min") == RestartBudget(0, 600.0)
    for text in ("8", "8 an hour", "-1 per 1h", "8 per 0s", "8 per hour", 8, None):
        with pytest.raises(ValueError):
            parse_budget(text)


@given(st.floats(min_value=1.0, max_value=1e8))
def test_a_shown_rate_parses_to_the_same_one(megabytes):
    rate = parse_rate(f"{megabytes:.3f}MB/s")
    assert rate is not None and parse_rate(show_rate(rate)) == pytest.approx(rate, rel=1e-9)


def test_a_rate_has_its_unit():
    assert (parse_rate("200MB/s"), parse_rate("1.5 GB/s"), parse_rate("off")) == (200e6, 1.5e9, None)
    for text in ("200", "200MB", "200 Mbit/s", "0.5MB/s", "-1MB/s", 200, True, None):
        with pytest.raises(ValueError, match="off, or bytes per second"):
            parse_rate(text)


@pytest.mark.parametrize("key", ["bucket", "kms", "alias/own", "arn:aws:kms:eu-west-1:123456789012:key/a-b"])
def test_who_encrypts(key):
    assert parse_encryption(key) == key


@pytest.mark.parametrize("key", ["", " ", "a key", "a\nkey"])
def test_what_encrypts_nothing(key):
    with pytest.raises(ValueError, match="KMS key"):
        parse_encryption(key)


@pytest.mark.parametrize("store", ["none", "/mnt/shared", "relative/dir", "s3://bucket", "s3://my.bucket/a/b"])
def test_stores(store):
    assert parse_store(store) == store


@pytest.mark.parametrize("store", ["", "  ", None, 7, "s3://", "s3://B/x", "gs://bucket/x", "http://x/y", "a\0b"])
def test_what_is_no_store(store):
    with pytest.raises(ValueError, match="a directory"):
        parse_store(store)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"restart": {"backoff": {"first": "2min", "max": "1min"}}}, "restart.backoff.first"),
        ({"coordination": {"lease": "60s"}, "interruption": {"grace": "30s"}}, "coordination.lease"),
        ({"interruption": {"grace": "10s", "script_grace": "11s"}}, "interruption.script_grace"),
        ({"interruption": {"grace": "60s", "max_runtime": "59s"}}, "interruption.grace"),
        ({"checkpoint": {"every": "10 steps", "snapshot_every": "20 steps"}}, "checkpoint.snapshot_every"),
        ({"checkpoint": {"every": "10 steps", "keep": {"every": "5 steps"}}}, "checkpoint.keep.every"),
        ({"elastic": {"hosts": {"max": 2}}}, "elastic.hosts.min"),
        ({"elastic": {"hosts": {"min": 3, "max": 2}}}, "elastic.hosts.min"),
        ({"telemetry": {"listen": "0.0.0.0:2379"}}, "telemetry.listen"),
        ({"telemetry": {"listen": "0.0.0.0:2380"}}, "telemetry.listen"),
        ({"failures": [{"cause": "hang", "exit_code": 3, "respond": "stop"}]}, "failures.0.exit_code"),
        (
            {"failures": [{"cause": "any", "respond": "restart"}, {"cause": "hang", "respond": "stop"}]},
            "failures.1",
        ),
    ],
)
def test_a_contradiction_names_the_knob_to_change(values, key):
    assert f"{key}: found" in refusal(values)


def test_an_external_etcd_leaves_its_port_to_others():
    values = {"coordination": {"endpoints": ["http://10.0.0.1:2379"]}, "telemetry": {"listen": "0.0.0.0:2379"}}
    assert Policy.model_validate(values).telemetry.listen == "0.0.0.0:2379"


@pytest.mark.parametrize(
    "values",
    [
        {"restart": {"ceiling": -1}},
        {"restart": {"ceiling": True}},
        {"restart": {"ceiling": 1.5}},
        {"restart": {"same_step": 1}},
        {"checkpoint": {"keep": {"last": 0}}},
        {"coordination": {"lease": "0s"}},
        {"coordination": {"port": 65535}},
        {"coordination": {"endpoints": []}},
        {"coordination": {"endpoints": ["10.0.0.1"]}},
        {"telemetry": {"listen": "localhost:70000"}},
        {"launch": {"strategy": "deepspeed"}},
        {"launch": {"python": ""}},
        {"version": 2},
        {"surprise": 1},
    ],
)
def test_a_value_out_of_range_is_refused(values):
    assert "validation error" in refusal(values)


def test_the_first_rule_that_matches_answers():
    policy = Policy.model_validate(
        {
            "failures": [
                {"cause": "user_code", "exit_code": 2, "respond": "stop"},
                {"cause": "user_code", "respond": "restart"},
                {"cause": "gpu_fault", "respond": "exit"},
                {"cause": "any", "respond": "stop"},
            ]
        }
    )
    answers = [
        policy.rule_for(FailureCause.USER_CODE, 2).respond,
        policy.rule_for(FailureCause.USER_CODE, 3).respond,
        policy.rule_for(FailureCause.GPU_FAULT, None).respond,
        policy.rule_for(FailureCause.HANG, 2).respond,
    ]
    assert answers == ["stop", "restart", "exit", "stop"]


@pytest.mark.parametrize("cause", list(FailureCause))
def test_without_rules_everything_is_restarted(cause):
    assert Policy.model_validate({"failures": []}).rule_for(cause, 1).respond == "restart"


def test_by_default_hardware_leaves_and_memory_stops():
    policy = Policy()
    answers = {cause: policy.rule_for(cause, None).respond for cause in FailureCause}
    assert {cause for cause, answer in answers.items() if answer != "restart"} == {
        FailureCause.GPU_FAULT,
        FailureCause.OUT_OF_MEMORY,
    }
    assert (answers[FailureCause.GPU_FAULT], answers[FailureCause.OUT_OF_MEMORY]) == ("exit", "stop")


EVERYTHING = {
    "version": 1,
    "launch": {"strategy": "multi_worker", "instrument": "off", "python": "/usr/bin/python3"},
    "restart": {"budget": "3 per 10min", "ceiling": 7, "backoff": {"first": "250ms", "max": "90s"}, "same_step": 2},
    "failures": [{"cause": "any", "exit_code": 2, "respond": "stop"}],
    "elastic": {
        "hosts": {"min": 2, "max": 4},
        "wait_for_return": "90s",
        "grow": "off",
        "batch": "keep_local",
    },
    "checkpoint": {
        "store": "s3://bucket/prefix",
        "every": "100 steps",
        "snapshot_every": "10 steps",
        "keep": {"last": 2, "every": "1000 steps"},
        "s3": {"encryption": "alias/own", "upload_rate": "1.5GB/s", "parts_in_flight": 8},
    },
    "interruption": {"grace": "20s", "script_grace": "1.5s", "max_runtime": "1h"},
    "health": {"gpu": {"poll": "500ms", "fatal_xids": [79], "temperature_max": 85.5}},
    "coordination": {
        "endpoints": ["http://10.0.0.1:2379", "http://10.0.0.2:2379"],
        "lease": "3s",
        "port": 12379,
        "tls": "off",
    },
    "telemetry": {"listen": "0.0.0.0:0"},
}


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"checkpoint": {"every": "2min"}}])
def test_json_gives_an_equal_policy_back(values):
    policy = Policy.model_validate(values)
    assert Policy.model_validate_json(policy.model_dump_json(by_alias=True)) == policy
    assert Policy.model_validate_json(policy.model_dump_json()) == policy
    assert Policy.model_validate(policy.model_dump(mode="json")) == policy


def test_the_example_turns_what_the_core_asks_for():
    policy = Policy.model_validate(EVERYTHING)
    assert (policy.snapshot_every_steps, policy.checkpoint_every) == (10, Cadence(steps=100))
    assert (policy.checkpoint.keep.every_steps, Policy().checkpoint.keep.every_steps) == (1000, None)
    assert (Policy().snapshot_every_steps, Policy().checkpoint_every) == (None, Cadence())


def test_the_knobs_are_few_and_each_has_a_unit_a_failure_and_a_description():
    found = dict(knobs(Policy))
    assert 20 < len(found) <= KNOBS_MAX
    told = {name for name, knob in found.items() if all(knob.get(key) for key in ("unit", "failure", "description"))}
    assert set(found) - told == set()
    assert {name for name, knob in found.items() if knob["required"]} == set()


KNOBS_OF_SECONDS_OR_A_RATE = ("hang.deadline", "health.repeat", "interruption.max_runtime", "checkpoint.s3.upload_rate")


@pytest.mark.parametrize("knob", KNOBS_OF_SECONDS_OR_A_RATE)
@pytest.mark.parametrize("number", [-1.0, 0.001, float("inf"), float("-inf"), float("nan")])
def test_numbers_without_a_unit_are_held_to_the_same_bounds(knob, number):
    *sections, name = knob.split(".")
    values: dict[str, object] = {name: number}
    for section in reversed(sections):
        values = {section: values}
    assert name in refusal(values)
