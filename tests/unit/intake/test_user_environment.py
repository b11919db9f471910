"""The user's script sees what it would see under AWS's toolkit."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.intake.contract import ContractOptions, load_contract, user_environment
from tests.unit.intake.opt_ml import HYPERPARAMETERS, attempt, make_opt_ml

TENSORFLOW = "sagemaker_tensorflow_container.training:main"
JOB = {"TRAINING_JOB_NAME": "digits-2026"}
BASE = "<base>"

# What sagemaker-training 5.1.4 sets for such a job; the machine's own counts of CPUs and GPUs left out.
EXPECTED = {
    "SM_CHANNELS": '["train","validation"]',
    "SM_CHANNEL_TRAIN": f"{BASE}/input/data/train",
    "SM_CHANNEL_VALIDATION": f"{BASE}/input/data/validation",
    "SM_CURRENT_HOST": "algo-1",
    "SM_CURRENT_INSTANCE_GROUP": "homogeneousCluster",
    "SM_CURRENT_INSTANCE_GROUP_HOSTS": '["algo-1","algo-10","algo-2"]',
    "SM_CURRENT_INSTANCE_TYPE": "ml.c5.xlarge",
    "SM_DISTRIBUTION_INSTANCE_GROUPS": '["homogeneousCluster"]',
    "SM_FRAMEWORK_MODULE": "",
    "SM_FRAMEWORK_PARAMS": '{"sagemaker_multi_worker_mirrored_strategy_enabled":true}',
    "SM_HOSTS": '["algo-1","algo-10","algo-2"]',
    "SM_HPS": '{"batch-size":32,"epochs":3,"name":"it\'s \\u00fc"}',
    "SM_HP_BATCH-SIZE": "32",
    "SM_HP_EPOCHS": "3",
    "SM_HP_NAME": "it's ü",
    "SM_INPUT_CONFIG_DIR": f"{BASE}/input/config",
    "SM_INPUT_DATA_CONFIG": '{"train":{"TrainingInputMode":"File"},"validation":{"TrainingInputMode":"Pipe"}}',
    "SM_INPUT_DIR": f"{BASE}/input",
    "SM_INSTANCE_GROUPS": '["homogeneousCluster"]',
    "SM_IS_HETERO": "false",
    "SM_LOG_LEVEL": "20",
    "SM_MODEL_DIR": f"{BASE}/model",
    "SM_MODULE_DIR": f"{BASE}/code",
    "SM_MODULE_NAME": "train",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_NEURONS": "0",
    "SM_OUTPUT_DATA_DIR": f"{BASE}/output/data",
    "SM_OUTPUT_DIR": f"{BASE}/output",
    "SM_OUTPUT_INTERMEDIATE_DIR": f"{BASE}/output/intermediate",
    "SM_USER_ARGS": '["--batch-size","32","--epochs","3","--name","it\'s \\u00fc"]',
    "SM_USER_ENTRY_POINT": "train.py",
}


def contract_in(tmp_path, **hyperparameters):
    given = {**HYPERPARAMETERS, **hyperparameters}
    channels = {"validation": {"TrainingInputMode": "Pipe"}, "train": {"TrainingInputMode": "File"}}
    return load_contract(make_opt_ml(tmp_path, hyperparameters=given, channels=channels), JOB)


def test_every_variable_of_the_toolkit_is_there(tmp_path):
    contract = contract_in(
        tmp_path,
        **{"batch-size": "32", "name": '"it\'s ü"', "sagemaker_multi_worker_mirrored_strategy_enabled": "true"},
    )
    shown = {name: value.replace(str(tmp_path), BASE) for name, value in user_environment(contract, {}).items()}
    assert {name: shown.get(name) for name in EXPECTED} == EXPECTED
    rest = {name for name in shown if name.startswith("SM_")} - set(EXPECTED)
    assert rest == {
        "SM_INSTANCE_GROUPS_DICT",
        "SM_NUM_CPUS",
        "SM_NUM_GPUS",
        "SM_RESOURCE_CONFIG",
        "SM_TRAINING_ENV",
    }


def test_the_training_env_is_the_whole_of_it(tmp_path):
    everything = json.loads(user_environment(contract_in(tmp_path), JOB)["SM_TRAINING_ENV"])
    assert everything["job_name"] == "digits-2026"
    assert everything["is_master"] is True
    assert everything["master_hostname"] == "algo-1"
    assert everything["hyperparameters"] == {"epochs": 3}
    assert everything["resource_config"]["topology"] is None
    nulls = {name for name, value in everything.items() if value is None}
    assert nulls == {"framework_module", "is_modelparallel_enabled", "topology"}


@pytest.mark.parametrize(
    ("named", "hosts"), [(None, []), ('["g1"]', ["algo-3"]), ('["g2","g1"]', ["algo-3", "algo-1"]), ("[]", [])]
)
def test_hosts_of_a_distribution_are_those_of_its_groups(tmp_path, named, hosts):
    groups = [{"instance_group_name": name, "hosts": [host]} for name, host in (("g1", "algo-3"), ("g2", "algo-1"))]
    resources = {"current_host": "algo-1", "hosts": ["algo-1", "algo-3"], "instance_groups": groups}
    given_ = HYPERPARAMETERS if named is None else {**HYPERPARAMETERS, "sagemaker_distribution_instance_groups": named}
    contract = load_contract(make_opt_ml(tmp_path, resources, given_), JOB)
    assert json.loads(user_environment(contract, {})["SM_TRAINING_ENV"])["distribution_hosts"] == hosts


def test_what_is_set_already_stays(tmp_path):
    environ = {**JOB, "SM_HOSTS": "theirs", "SM_OWN": "1", "PATH": "/bin", "AWS_REGION": "eu-west-1"}
    shown = user_environment(contract_in(tmp_path), environ)
    assert (shown["SM_HOSTS"], shown["SM_OWN"], shown["PATH"]) == ("theirs", "1", "/bin")
    assert (shown["SAGEMAKER_REGION"], shown["SAGEMAKER_JOB_NAME"], shown["CURRENT_HOST"]) == (
        "eu-west-1",
        "digits-2026",
        "algo-1",
    )


def test_what_init_tells_the_agent_is_not_for_the_script(tmp_path):
    environ = {"KEEPSTEP_INIT_FD": "5", "KEEPSTEP_INIT_STATE": "{}", "KEEPSTEP_OTHER": "x"}
    shown = user_environment(contract_in(tmp_path), environ)
    assert [name for name in shown if name.startswith("KEEPSTEP_")] == ["KEEPSTEP_OTHER"]


def test_the_code_folder_can_be_imported_from(tmp_path):
    contract = contract_in(tmp_path)
    shown = user_environment(contract, {"PYTHONPATH": f"/libs:{contract.code_dir}"})
    assert shown["PYTHONPATH"] == f"{contract.code_dir}:/libs"


def test_a_laptop_has_the_variables_as_well(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    shown = user_environment(load_contract(tmp_path / "none", {}, ContractOptions("mine.py", ("-x", "1"))), {})
    assert (shown["SM_HOSTS"], shown["SM_CURRENT_INSTANCE_TYPE"]) == ('["localhost"]', "local")
    assert (shown["SM_USER_ARGS"], shown["SM_USER_ENTRY_POINT"]) == ('["-x","1"]', "mine.py")
    assert "PYTHONPATH" not in shown


def test_a_variable_that_no_process_could_be_given_is_refused(tmp_path):
    contract = contract_in(tmp_path, **{f"p{number}": "x" * 2500 for number in range(60)})
    with pytest.raises(ConfigError, match=r"SM_(HPS|TRAINING_ENV|USER_ARGS): the variable takes") as caught:
        user_environment(contract, {})
    assert caught.value.exit_code == 78


def test_topology_is_shown_where_there_is_one(tmp_path):
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "topology": [{"hostName": "algo-1"}]}
    contract = load_contract(make_opt_ml(tmp_path, resources), JOB)
    assert user_environment(contract, {})["SM_TOPOLOGY"] == '[{"hostName":"algo-1"}]'


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3),
    max_leaves=4,
)
_NAMES = st.text(max_size=12) | st.sampled_from(
    [
        "sagemaker_distribution_instance_groups",
        "sagemaker_container_log_level",
        "sagemaker_region",
        "sagemaker_mpi_enabled",
    ]
)


@settings(max_examples=60)
@given(st.dictionaries(_NAMES, st.text(max_size=20) | _VALUES | _VALUES.map(json.dumps), max_size=5))
def test_any_hyperparameters_give_what_a_process_can_be_given_or_an_error(given_):
    with tempfile.TemporaryDirectory() as folder:
        base = make_opt_ml(Path(folder) / "ml", hyperparameters={**given_, "sagemaker_program": "train.py"})
        contract, error = attempt(lambda: load_contract(base, JOB))
        if contract is None:
            assert "hyperparameters.json" in error and "; wanted " in error
            return
        environment, error = attempt(lambda: user_environment(contract, {}))
        if environment is None:
            assert "hyperparameters.json: sagemaker_distribution_instance_groups" in error
            return
        for text in (*environment, *environment.values(), *contract.arguments):
            assert b"\0" not in os.fsencode(text)
        assert not any("=" in name or not name for name in environment)


def test_a_value_nested_too_deep_is_an_error(tmp_path):
    base = make_opt_ml(tmp_path, hyperparameters={**HYPERPARAMETERS, "deep": "[" * 70 + "]" * 70})
    with pytest.raises(ConfigError, match="deep: found more than 64 levels"):
        load_contract(base, JOB)


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, [None, None, None]),
        ({"SAGEMAKER_TRAINING_MODULE": "mine:main", "AWS_REGION": "eu-west-1"}, [None, None, None]),
        ({"SAGEMAKER_TRAINING_MODULE": TENSORFLOW}, ["1", "1", None]),
        ({"SAGEMAKER_TRAINING_MODULE": TENSORFLOW, "AWS_REGION": "eu-west-1"}, ["1", "1", "eu-west-1"]),
        ({"SAGEMAKER_TRAINING_MODULE": TENSORFLOW, "TF_CPP_MIN_LOG_LEVEL": "3"}, ["3", "1", None]),
    ],
)
def test_what_the_tensorflow_images_set_is_set_in_them(tmp_path, environ, shown):
    found = user_environment(contract_in(tmp_path), environ)
    assert [found.get(name) for name in ("TF_CPP_MIN_LOG_LEVEL", "S3_USE_HTTPS", "S3_REGION")] == shown
