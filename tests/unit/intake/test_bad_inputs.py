"""Whatever is wrong with what came in is said in one clear line, and the container exits with 78."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from keepstep.errors import ConfigError, ExitCode
from keepstep.intake.contract import ContractOptions, load_contract, user_environment
from keepstep.intake.policy import load_policy

HOSTS = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}
PARAMETERS = {"sagemaker_program": "train.py"}
LINE_MAX = 700


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A whole /opt/ml with nothing wrong."""
    (tmp_path / "input" / "config").mkdir(parents=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print()\n")
    write(tmp_path, "resourceconfig.json", json.dumps(HOSTS))
    write(tmp_path, "hyperparameters.json", json.dumps(PARAMETERS))
    return tmp_path


def write(base: Path, name: str, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (base / "input" / "config" / name).write_bytes(data)


def refused(
    base: Path, environ: Mapping[str, str] | None = None, options: ContractOptions | None = None
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_contract(base, environ or {}, options or ContractOptions())
    return caught.value


def assert_clear(error: ConfigError, *pieces: str) -> None:
    """One line, not a traceback's worth of it; found and wanted; the pieces; and the exit code."""
    text = str(error)
    assert (error.exit_code, int(error.exit_code), error.retryable) == (ExitCode.CONFIGURATION, 78, False)
    assert text.isprintable() and len(text) <= LINE_MAX
    assert error.found and error.wanted and "; wanted " in text
    assert [piece for piece in pieces if piece not in text] == []


def test_nothing_is_wrong_to_begin_with(base):
    assert load_contract(base, {}, ContractOptions()).current_host == "algo-1"


RESOURCES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("resourceconfig.json", "empty")),
    "blank": (" \n\n", ("resourceconfig.json", "empty")),
    "truncated": ('{\n  "hosts": ["algo-1"', ("resourceconfig.json:2", "ends in mid-value")),
    "malformed": ('{\n  "hosts": ["algo-1"],\n  oops\n}', ("resourceconfig.json:3", "malformed JSON")),
    "trailing": (json.dumps(HOSTS) + "\n{}", ("resourceconfig.json:2", "malformed JSON")),
    "list": ("[]", ("resourceconfig.json:1", "found []", "a JSON object")),
    "deep": ("[" * 200_000, ("resourceconfig.json", "malformed JSON")),
    "key twice": ('{"hosts": ["a"],\n"hosts": ["b"]}', ("resourceconfig.json", "hosts", "twice")),
    "not UTF-8": (b'{\n"hosts": "\xff"}', ("resourceconfig.json:2", "0xff", "UTF-8")),
    "UTF-16": (json.dumps(HOSTS).encode("utf-16"), ("resourceconfig.json:1", "UTF-8")),
    "huge": (b" " * (3 << 20), ("resourceconfig.json", "bytes")),
    "no hosts": ('{"current_host": "algo-1"}', ("resourceconfig.json", "hosts", "missing")),
    "hosts empty": ('{\n"current_host": "a",\n"hosts": []}', ("resourceconfig.json:3", "hosts", "found []")),
    "hosts a string": ('{"current_host": "a", "hosts": "a"}', ("resourceconfig.json:1", "hosts", 'found "a"')),
    "hosts null": ('{"current_host": "a", "hosts": null}', ("resourceconfig.json:1", "hosts", "null")),
    "hosts of numbers": ('{"current_host": "a", "hosts": ["a", 2]}', ("hosts", "found 2")),
    "host empty": ('{"current_host": "a", "hosts": ["a", ""]}', ("hosts", 'found ""')),
    "host with a slash": ('{"current_host": "a", "hosts": ["a", "../b"]}', ("hosts", "../b")),
    "host twice": ('{"current_host": "a", "hosts": ["a", "b", "a"]}', ("hosts", '"a" twice')),
    "no current_host": ('{"hosts": ["algo-1"]}', ("current_host", "missing")),
    "current_host a number": ('{"current_host": 1, "hosts": ["algo-1"]}', ("current_host", "found 1")),
    "stranger": ('{"hosts": ["algo-1"],\n"current_host": "algo-3"}', (":2", "current_host", "algo-3", "algo-1")),
    "interface": (json.dumps({**HOSTS, "network_interface_name": 0}), ("network_interface_name", "found 0")),
    "NUL": (
        '{"hosts": ["a"], "current_host": "a",\n"network_interface_name": "e\\u0000"}',
        (":2", "network_interface", "NUL"),
    ),
    "surrogate": ('{"hosts": ["a"], "current_host": "a",\n"topology": ["\\ud800"]}', (":2", "topology", "surrogate")),
    "too deep": ('{"topology":\n' + "[" * 99 + "]" * 99 + "}", (":1", "topology", "more than 64 levels")),
    "group's name": (json.dumps({**HOSTS, "current_group_name": [1]}), ("current_group_name", "found [1]")),
    "instance type": (json.dumps({**HOSTS, "current_instance_type": 4}), ("current_instance_type", "found 4")),
    "groups": (json.dumps({**HOSTS, "instance_groups": {}}), ("instance_groups", "found {}")),
    "group of strangers": (
        json.dumps({**HOSTS, "instance_groups": [{"instance_group_name": "g", "hosts": ["algo-9"]}]}),
        ("instance_groups", "algo-9"),
    ),
}


@pytest.mark.parametrize("case", RESOURCES)
def test_resourceconfig(base, case):
    content, pieces = RESOURCES[case]
    write(base, "resourceconfig.json", content)
    assert_clear(refused(base), *pieces)


HYPERPARAMETERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "truncated": ('{"a": "1",', ("hyperparameters.json:1", "ends in mid-value")),
    "list": ('["a"]', ("hyperparameters.json:1", 'found ["a"]')),
    "key twice": ('{"a": "1",\n"a": "2"}', ("hyperparameters.json", "a: ", "twice")),
    "program a number": ('{"sagemaker_program": "7"}', ("hyperparameters.json", "sagemaker_program", "found 7")),
    "program empty": ('{"sagemaker_program": "\\"\\""}', ("hyperparameters.json", "sagemaker_program", 'found ""')),
    "program away": ('{"sagemaker_program": "none.py"}', ("sagemaker_program", "none.py", "/code")),
    "no program": ("{}", ("SCRIPT", "no script is named")),
    "NUL": ('{"sagemaker_program": "train.py",\n"a": "x\\u0000y"}', ("hyperparameters.json:2", "a: ", "NUL")),
    "surrogate": ('{"sagemaker_program": "train.py",\n"a": "\\ud800"}', ("hyperparameters.json:2", "surrogate")),
    "surrogate in a key": ('{"sagemaker_program": "train.py",\n"\\ud800": "1"}', (": \\ud800: found", "surrogate")),
    "NUL behind JSON": ('{"sagemaker_program": "train.py", "a": "\\"\\\\u0000\\""}', (":1", "a: ", "NUL")),
    "too deep behind JSON": (
        json.dumps({"sagemaker_program": "train.py", "a": "[" * 99 + "]" * 99}),
        (":1", "a: ", "more than 64 levels"),
    ),
    "key with =": ('{"a=b": "1"}', ("hyperparameters.json:1", "a=b")),
    "policy a list": ('{"sagemaker_program": "train.py", "keepstep_policy": "[1]"}', ("keepstep_policy", "[1]")),
    "store a number": ('{"sagemaker_program": "train.py", "keepstep_store": "5"}', ("keepstep_store", "found 5")),
    "store unknown": (
        '{"sagemaker_program": "train.py", "keepstep_store": "gs://b/x"}',
        ("keepstep_store", "gs://b/x", "s3://bucket/prefix"),
    ),
    "job name": (
        '{"sagemaker_program": "train.py", "sagemaker_job_name": "a/b"}',
        ("sagemaker_job_name", "a/b"),
    ),
}


@pytest.mark.parametrize("case", HYPERPARAMETERS)
def test_hyperparameters(base, case):
    content, pieces = HYPERPARAMETERS[case]
    write(base, "hyperparameters.json", content)
    assert_clear(refused(base), *pieces)


def test_a_distribution_s_groups_are_checked_before_the_script_is_told(base):
    write(base, "hyperparameters.json", json.dumps({**PARAMETERS, "sagemaker_distribution_instance_groups": "5"}))
    contract = load_contract(base, {}, ContractOptions())
    with pytest.raises(ConfigError) as caught:
        user_environment(contract, {})
    assert_clear(caught.value, "hyperparameters.json", "sagemaker_distribution_instance_groups", "found 5")


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ('{"train": 5}', ("inputdataconfig.json:1", "train", "found 5")),
        ('{"../../etc": {}}', ("inputdataconfig.json:1", "../../etc")),
        ('{"..": {}}', ("inputdataconfig.json:1", "..")),
        ("{", ("inputdataconfig.json:1", "malformed JSON")),
    ],
)
def test_inputdataconfig(base, content, pieces):
    write(base, "inputdataconfig.json", content)
    assert_clear(refused(base), *pieces)


def test_a_platform_without_its_description_of_the_hosts(base):
    (base / "input" / "config" / "resourceconfig.json").unlink()
    assert_clear(refused(base), "resourceconfig.json", "missing")
    named = ContractOptions(script="train.py")
    assert_clear(refused(base, {"TRAINING_JOB_NAME": "job"}, named), "resourceconfig.json", "missing")


def test_a_directory_in_a_file_s_place(base):
    (base / "input" / "config" / "resourceconfig.json").unlink()
    (base / "input" / "config" / "resourceconfig.json").mkdir()
    assert_clear(refused(base), "resourceconfig.json", "a directory")


def test_a_pipe_in_a_file_s_place_blocks_nothing(base):
    (base / "input" / "config" / "hyperparameters.json").unlink()
    os.mkfifo(base / "input" / "config" / "hyperparameters.json")
    assert_clear(refused(base), "hyperparameters.json", "no plain file")


@pytest.mark.parametrize(
    ("script", "pieces"),
    [
        ("none.py", ("SCRIPT", "none.py", "is not there")),
        ("/none/none.py", ("SCRIPT", "/none/none.py", "is not there")),
        ("folder.py", ("SCRIPT", "folder.py is a directory")),
        ("--epochs", ("SCRIPT", "--epochs", "does not begin with -")),
        ("pipe.py", ("SCRIPT", "pipe.py is no plain file")),
        ("train.py/inner.py", ("SCRIPT",)),
        ("x" * 300 + ".py", ("SCRIPT",)),
        ("tra\0in.py", ("SCRIPT", "NUL")),
        ("\udcff.py", ("SCRIPT", "\\udcff.py", "UTF-8")),
        ("two\nlines.py", ("SCRIPT", "two\\nlines.py")),
        ("", ("SCRIPT",)),
    ],
)
def test_a_script_that_is_none(base, script, pieces):
    (base / "code" / "folder.py").mkdir()
    os.mkfifo(base / "code" / "pipe.py")
    assert_clear(refused(base, {}, ContractOptions(script=script)), *pieces)


@pytest.mark.parametrize(
    ("environ", "options", "pieces"),
    [
        ({"SAGEMAKER_PROGRAM": "none.py"}, ContractOptions(), ("environment", "SAGEMAKER_PROGRAM", "none.py")),
        ({"TRAINING_JOB_NAME": "a b"}, ContractOptions(), ("TRAINING_JOB_NAME", "a b")),
        ({"KEEPSTEP_STORE": "s3://"}, ContractOptions(), ("KEEPSTEP_STORE", "s3://")),
        ({"KEEPSTEP_STORE": ""}, ContractOptions(), ("KEEPSTEP_STORE", 'found ""')),
        ({}, ContractOptions(store="s3://UPPER/x"), ("--store", "s3://UPPER/x")),
        ({"KEEPSTEP_POLICY": "\udcff"}, ContractOptions(), ("KEEPSTEP_POLICY", "\\udcff", "UTF-8")),
        ({}, ContractOptions("train.py", ("a", "\udcff")), ("ARGS", "\\udcff", "UTF-8")),
        ({}, ContractOptions(policy=""), ("--policy", 'found ""')),
    ],
)
def test_the_environment_and_the_command_line(base, environ, options, pieces):
    assert_clear(refused(base, environ, options), *pieces)


POLICIES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("p.yaml", "empty", "version: 1")),
    "only a comment": ("# later\n", ("p.yaml", "empty")),
    "a list": ("- version\n", ("p.yaml:1", "found", "sections and knobs")),
    "a word": ("default\n", ("p.yaml:1", 'found "default"')),
    "no version": ("restart: {ceiling: 3}\n", ("p.yaml", "version", "missing")),
    "another version": ("version: 2\n", ("p.yaml:1", "version", "found 2")),
    "version as text": ("version: '1'\n", ("p.yaml:1", "version", 'found "1"')),
    "version true": ("version: true\n", ("p.yaml:1", "version", "found true")),
    "unclosed": ("version: 1\nrestart: {ceiling: 3\n", ("p.yaml:3", "malformed YAML")),
    "indentation": ("version: 1\nrestart:\n  ceiling: 3\n budget: 8 per 1h\n", ("p.yaml:4", "malformed YAML")),
    "a tab": ("version: 1\nrestart:\n\tceiling: 3\n", ("p.yaml:3", "tab")),
    "a control character": ("version: 1\n# \x07\n", ("p.yaml:2", "character")),
    "not UTF-8": (b"version: 1\n# \xe9\n", ("p.yaml:2", "0xe9", "UTF-8")),
    "too large": ("version: 1\n" + "#" * 262_144, ("p.yaml", "262144 bytes")),
    "a key twice": ("version: 1\nrestart:\n  ceiling: 3\n  ceiling: 4\n", ("p.yaml:4", "restart.ceiling", "twice")),
    "a section twice": ("version: 1\nrestart: {}\nrestart: {}\n", ("p.yaml:3", "restart", "twice")),
    "a second document": ("version: 1\n---\nversion: 1\n", ("p.yaml:2", "second document")),
    "an alias": ("version: 1\nrestart: &a {ceiling: 3}\nlaunch: *a\n", ("p.yaml:2", "anchor")),
    "laughs": (
        "version: 1\na: &a [x, x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
        ("p.yaml:2", "anchor"),
    ),
    "a tag": ("version: 1\nlaunch: !!python/object:os.system {}\n", ("p.yaml:2", "tag")),
    "a merge key": ("version: 1\nrestart:\n  <<: {ceiling: 3}\n", ("p.yaml:3", "restart.<<", "no such knob")),
    "a NUL": ('version: 1\nlaunch:\n  python: "a\\0b"\n', ("p.yaml:3", "NUL")),
    "a surrogate": ('version: 1\n"\\ud800": 1\n', ("p.yaml:2", "surrogate")),
    "a key of two lines": ('version: 1\n"a\\nb": 1\n', ("p.yaml:2", "a\\nb", "no such knob")),
    "a long value": (f"version: 1\nlaunch: {{strategy: {'x' * 9000}}}\n", ("p.yaml:2", "launch.strategy", "xxx…")),
    "too deep": ("version: 1\nlaunch: " + "[" * 40 + "]" * 40 + "\n", ("p.yaml:2", "levels")),
    "an unknown section": ("version: 1\nrestarts: {}\n", ("p.yaml:2", "restarts", "no such knob")),
    "an unknown knob": ("version: 1\nrestart:\n  ceilling: 3\n", ("p.yaml:3", "restart.ceilling", "no such knob")),
    "no unit": ("version: 1\ncoordination:\n  lease: 5\n", ("p.yaml:3", "coordination.lease", "found 5", "unit")),
    "a wrong unit": ("version: 1\ncoordination: {lease: 5 parsecs}\n", ("p.yaml:2", "5 parsecs", "a duration")),
    "out of range": ("version: 1\ncoordination: {lease: 2min}\n", ("coordination.lease", "found 2min", "1s to 1min")),
    "a knob that is a list": ("version: 1\nrestart: {ceiling: [3]}\n", ("p.yaml:2", "restart.ceiling", "whole number")),
    "a section that is a word": ("version: 1\nrestart: never\n", ("p.yaml:2", "restart", "found never", "a section")),
    "a budget": ("version: 1\nrestart: {budget: 8 an hour}\n", ("restart.budget", "8 an hour", "8 per 1h")),
    "a cadence": ("version: 1\ncheckpoint: {every: often}\n", ("checkpoint.every", "often", "500 steps")),
    "a name": ("version: 1\nlaunch: {strategy: deepspeed}\n", ("launch.strategy", "found deepspeed", "multi_worker")),
    "a cause": (
        "version: 1\nfailures:\n- {cause: any_gpu, respond: stop}\n",
        ("p.yaml:3", "failures[0].cause", "any_gpu", "gpu_fault"),
    ),
    "a rule without an answer": ("version: 1\nfailures:\n- {cause: any}\n", ("p.yaml:3", "failures[0].respond")),
    "a rule that never matches": (
        "version: 1\nfailures:\n- {cause: any, respond: stop}\n- {cause: hang, respond: stop}\n",
        ("p.yaml:4", "failures[1]", "rule 2", "rule 1"),
    ),
    "a contradiction": (
        "version: 1\nrestart:\n  backoff:\n    first: 2min\n",
        ("p.yaml:4", "restart.backoff.first", "2min", "restart.backoff.max"),
    ),
    "null for a knob": ("version: 1\nrestart: {ceiling: }\n", ("p.yaml:2", "restart.ceiling")),
}


@pytest.mark.parametrize("case", POLICIES)
def test_policy(tmp_path, case):
    content, pieces = POLICIES[case]
    file = tmp_path / "p.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_policy(str(file))
    assert_clear(caught.value, str(file), *pieces)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("restart: {ceilling: 3}", "restart.ceiling"),
        ("checkpiont: {}", "checkpoint"),
        ("lease: 5s", "coordination.lease"),
        ("checkpoint: {keep: {lst: 3}}", "checkpoint.keep.last"),
    ],
)
def test_the_nearest_knob_is_offered(tmp_path, line, hint):
    file = tmp_path / "p.yaml"
    file.write_text(f"version: 1\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_policy(str(file))
    assert f"did you mean {hint}?" in caught.value.describe()


def test_what_else_is_wrong_stands_in_the_hint(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\nrestart: {ceiling: -1}\ncoordination: {lease: 5}\n")
    with pytest.raises(ConfigError) as caught:
        load_policy(str(file))
    assert_clear(caught.value, "p.yaml:2", "restart.ceiling", "found -1")
    assert "coordination.lease" in caught.value.hint


def test_a_policy_that_is_not_there(tmp_path):
    for source, pieces in (
        (str(tmp_path / "none.yaml"), ("none.yaml", "no such file or preset")),
        ("defualt", ("defualt", "no such file or preset")),
        (str(tmp_path), (str(tmp_path), "a directory")),
        ("", ("wanted",)),
        ("\udcff", ("\\udcff", "no such file or preset")),
        ("x" * 9000, ("xxx…", "can not be read")),
    ):
        with pytest.raises(ConfigError) as caught:
            load_policy(source)
        assert_clear(caught.value, *pieces)


@pytest.mark.parametrize(
    ("override", "pieces"),
    [
        ("", ("--set", "KNOB=VALUE")),
        ("checkpoint.every", ("--set", "checkpoint.every", "KNOB=VALUE")),
        ("=5", ("--set", "KNOB=VALUE")),
        ("restart.ceilling=5", ("--set", "restart.ceilling", "no such knob")),
        ("restart=5", ("--set", "restart", "a section", "restart.ceiling")),
        ("restart.ceiling.more=5", ("--set", "restart.ceiling.more", "the whole of restart.ceiling")),
        ("failures.0.respond=stop", ("--set", "failures.0.respond", "the whole of failures")),
        ("launch.python=\udcff", ("--set", "\\udcff")),
        ("launch.strategy=two\nlines", ("--set", "two\\nlines")),
        ("restart.ceiling=many", ("--set", "restart.ceiling", "found many", "whole number")),
        ("coordination.lease=5", ("--set", "coordination.lease", "found 5", "unit")),
        ("restart.ceiling={", ("--set", "malformed YAML")),
        ("restart.backoff.first=5min", ("--set", "restart.backoff.first", "5min")),
        ("version=3", ("--set", "version", "found 3")),
    ],
)
def test_an_override(override, pieces):
    with pytest.raises(ConfigError) as caught:
        load_policy("default", [override])
    assert_clear(caught.value, *pieces)
