"""Instance groups: who trains, who feeds, who does neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.intake.contract import Contract, ContractOptions, load_contract, parts_of
from tests.unit.intake.opt_ml import make_opt_ml

GPU, CPU, OTHER = ["algo-3", "algo-10"], ["algo-2", "algo-1"], ["algo-4"]


def contract_of(folder: Path, groups: dict[str, list[str]], named: Any = None) -> Contract:
    hosts = sorted(host for each in groups.values() for host in each) or ["algo-1", "algo-2"]
    resources: dict[str, Any] = {"current_host": hosts[0], "hosts": hosts}
    if groups:
        described = [{"instance_group_name": name, "instance_type": "ml.c5.xlarge", "hosts": each}
                     for name, each in groups.items()]  # fmt: skip
        resources |= {
            "instance_groups": described,
            "current_group_name": "any",
            "current_instance_type": "ml.c5.xlarge",
        }
    given = {} if named is None else {"sagemaker_distribution_instance_groups": json.dumps(named)}
    base = make_opt_ml(folder, resources=resources, hyperparameters={"sagemaker_program": "train.py", **given})
    return load_contract(base, {"TRAINING_JOB_NAME": "job"}, ContractOptions(script="train.py"))


def test_without_groups_all_train(tmp_path: Path) -> None:
    assert parts_of(contract_of(tmp_path, {}), "none") == (("algo-1", "algo-2"), (), ())


def test_a_group_feeds_and_the_others_train_in_natural_order(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, {"gpu": GPU, "cpu": CPU})
    assert parts_of(contract, "cpu") == (("algo-3", "algo-10"), ("algo-1", "algo-2"), ())
    assert parts_of(contract, "none") == (("algo-1", "algo-2", "algo-3", "algo-10"), (), ())


def test_only_the_groups_that_the_platform_names_train(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, {"gpu": GPU, "cpu": CPU, "other": OTHER}, ["gpu"])
    assert parts_of(contract, "cpu") == (("algo-3", "algo-10"), ("algo-1", "algo-2"), ("algo-4",))
    assert parts_of(contract, "none") == (("algo-3", "algo-10"), (), ("algo-1", "algo-2", "algo-4"))


@pytest.mark.parametrize(
    ("groups", "named", "wanted", "said"),
    [
        ({}, None, "cpu", 'launch.data_service: found "cpu"; wanted none: the job has no instance groups'),
        ({"gpu": GPU}, None, "cpu", 'launch.data_service: found "cpu"; wanted one of gpu, or none'),
        ({"gpu": GPU}, None, "gpu", "which all hosts are in; wanted a group beside it that trains"),
        ({"gpu": GPU, "cpu": []}, None, "cpu", 'found "cpu", which has no hosts; wanted a group that has some'),
        ({"gpu": GPU}, [{"a": 1}], "none", "sagemaker_distribution_instance_groups: found"),
        ({"gpu": GPU}, "gpu", "none", "wanted a list of instance groups"),
        ({"gpu": GPU, "cpu": CPU}, ["gpu", "cpu"], "cpu", "wanted groups other than cpu, which runs tf.data's service"),
    ],
)
def test_parts_that_can_not_be_are_refused(
    tmp_path: Path, groups: dict[str, list[str]], named: Any, wanted: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parts_of(contract_of(tmp_path, groups, named), wanted)
    assert said in caught.value.describe()


def test_a_group_that_is_named_twice_trains_once(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, {"gpu": GPU, "cpu": CPU}, ["gpu", "gpu"])
    assert parts_of(contract, "none").trainers == ("algo-3", "algo-10")
