"""Policies from presets, files and settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.policy import Policy
from keepstep.core.quantities import Cadence
from keepstep.errors import ConfigError
from keepstep.intake.policy import explain, json_schema, load_policy, load_sourced_policy, preset_names
from keepstep.intake.policy.knobs import knobs
from keepstep.intake.policy.presets import read_preset
from keepstep.intake.policy.yaml_text import YamlText, parse_yaml
from tests.unit.intake.opt_ml import attempt

GOLDEN = Path(__file__).parent / "explain_spot.txt"


def test_the_default_preset_says_what_the_tree_says():
    assert load_policy() == load_policy("default") == Policy()


def test_the_default_preset_names_every_knob():
    origins = load_sourced_policy("default").origins
    assert {knob.name for knob in knobs() if origins.written(knob.path) is None} == set()


@pytest.mark.parametrize("name", ["default", "spot"])
def test_presets_are_sound(name):
    assert name in preset_names()
    assert load_policy(name).version == 1


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_read_alike_by_both_readers(name):
    text = read_preset(name)
    assert parse_yaml(text, name, is_ours=True) == parse_yaml(text, name)


def test_a_file_changes_what_it_names(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "# mine\nversion: 1\ncheckpoint:\n  every: 500 steps\n  keep: {last: 5, every: off}\nrestart:\n"
    )
    policy = load_policy(tmp_path / "mine.yaml")
    assert policy.checkpoint.every == Cadence(steps=500)
    assert (policy.checkpoint.keep.last, policy.checkpoint.keep.every) == (5, None)
    assert policy.restart == Policy().restart


def test_a_preset_goes_before_a_file_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "spot").write_text("version: 1\nrestart: {ceiling: 1}\n")
    monkeypatch.chdir(tmp_path)
    assert load_policy("spot").restart.ceiling == 50
    assert load_policy("./spot").restart.ceiling == 1


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("checkpoint.every=2min", lambda policy: policy.checkpoint.every == Cadence(seconds=120.0)),
        ("checkpoint.store=s3://bucket/a b", lambda policy: policy.checkpoint.store == "s3://bucket/a b"),
        ("checkpoint.store=/data/x: #1", lambda policy: policy.checkpoint.store == "/data/x: #1"),
        ("interruption.max_runtime=1h", lambda policy: policy.interruption.max_runtime == 3600.0),
        ("restart.ceiling=7", lambda policy: policy.restart.ceiling == 7),
        ("restart.backoff.max=5min", lambda policy: policy.restart.backoff.max == 300.0),
        ("launch.python='3'", lambda policy: policy.launch.python == "3"),
        ("coordination.endpoints=[http://a:1, http://b:2]", lambda policy: len(policy.coordination.endpoints) == 2),
        ("failures=[{cause: any, respond: stop}]", lambda policy: len(policy.failures) == 1),
    ],
)
def test_a_knob_can_be_set(setting, read):
    assert not read(load_policy())
    assert read(load_policy("default", [setting]))


def test_the_last_setting_holds():
    assert load_policy("spot", ["restart.ceiling=1", "restart.ceiling=2"]).restart.ceiling == 2


def test_explain_shows_every_knob_and_where_it_was_set():
    """Write the table again with: keepstep policy explain spot --set checkpoint.store=s3://bucket/job"""
    table = explain(load_sourced_policy("spot", ["checkpoint.store=s3://bucket/job"]))
    assert table + "\n" == GOLDEN.read_text()


def test_explain_has_a_line_for_each_rule_and_knows_both_lists(tmp_path):
    (tmp_path / "mine.yaml").write_text("version: 1\nfailures:\n  - {cause: user_code, exit_code: 2, respond: stop}\n")
    lines = explain(load_sourced_policy(tmp_path / "mine.yaml")).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("failures"))
    assert "cause=user_code exit_code=2 respond=stop" in lines[at]
    assert f"{tmp_path / 'mine.yaml'}:2" in lines[at]
    assert ["cause=out_of_memory" in lines[at + 1], "cause=any" in lines[at + 2]] == [True, True]


def test_the_schema_knows_every_section_and_refuses_others():
    schema = json_schema()
    assert set(schema["properties"]) == set(Policy.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Coordination"]["properties"]["lease"]["type"] == "string"


@given(st.text(alphabet=st.sampled_from("version: 1\nrestart{}[]-&*!|>'\"#%@`,?~\t\0\x01é😀 "), max_size=120))
def test_any_text_is_plain_values_or_an_error(text):
    parsed, error = attempt(lambda: parse_yaml(text, "f.yaml"))
    assert error.startswith("f.yaml") if parsed is None else isinstance(parsed, YamlText)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: on\nb: off\nc: yes\nd: 1:30\ne: 2026-01-01\nf: 0x10\ng: 010", "words"),
        ("a: true\nb: false\nc: null\nd: ~\ne: -3\nf: 1.5\ng: 1e3\nh: '5'", "values"),
    ],
)
def test_scalars_are_what_yaml_1_2_makes_of_them(text, value):
    found = parse_yaml(text, "f").value
    if value == "words":
        assert found == {
            "a": "on", "b": "off", "c": "yes", "d": "1:30", "e": "2026-01-01", "f": "0x10", "g": 10,
        }  # fmt: skip
    else:
        assert found == {"a": True, "b": False, "c": None, "d": None, "e": -3, "f": 1.5, "g": 1000.0, "h": "5"}


def test_the_first_complaint_names_the_others(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "version: 1\nrestart:\n  ceiling: many\n  budget: 8\nlaunch: {strategy: deepspeed}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path / "p.yaml")
    assert caught.value.describe().splitlines() == [
        f"{tmp_path}/p.yaml:3: restart.ceiling: found many; wanted a whole number, from 0 to 10000",
        "  hint: wrong as well: restart.budget, launch.strategy",
    ]
