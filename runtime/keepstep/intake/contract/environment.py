"""The environment: read once, and shown to the user's script as AWS's toolkit would show it.

Source: sagemaker-training 5.1.4, `environment.py` and `mapping.py`: names, defaults, compact JSON with sorted keys.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

from keepstep.errors import ConfigError
from keepstep.intake.contract.hyperparameters import framework_parameters, is_true, users_own
from keepstep.intake.contract.resources import instance_groups
from keepstep.intake.contract.strategy import count_gpus
from keepstep.intake.contract.values import Contract
from keepstep.intake.files import show

VARIABLE_BYTES_MAX = 131_071
"""Linux takes no longer string, name and = included, in a process's environment."""
_LOG_LEVEL = 20
_JOB_VARIABLE = "TRAINING_JOB_NAME"
_INTERNAL = ("KEEPSTEP_INIT_FD", "KEEPSTEP_INIT_STATE")
_TENSORFLOW_MODULE = "sagemaker_tensorflow_container"
_OF_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "1", "S3_USE_HTTPS": "1"}
"""What AWS's TensorFlow images have their module set. Source: sagemaker-tensorflow-training 20.4.1, `s3_utils.py`."""
_DISTRIBUTION_GROUPS = "sagemaker_distribution_instance_groups"
_DISTRIBUTIONS = (
    "sagemaker_mpi_enabled",
    "sagemaker_parameter_server_enabled",
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_pytorch_xla_multi_worker_enabled",
    "sagemaker_multi_worker_mirrored_strategy_enabled",
    "sagemaker_torch_distributed_enabled",
)


def read_environment() -> dict[str, str]:
    """This process's environment; nothing else in the agent reads it."""
    return dict(os.environ)


def user_environment(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the user's script: what is there, and the SM_* variables that are not.

    Raises:
        ConfigError: a variable would be longer than Linux takes.
    """
    shown = _sagemaker_variables(contract, environ)
    shown |= {
        "SAGEMAKER_JOB_NAME": _text(contract.hyperparameters.get("sagemaker_job_name") or environ.get(_JOB_VARIABLE)),
        "CURRENT_HOST": contract.current_host,
    }
    region = contract.hyperparameters.get("sagemaker_region") or environ.get("AWS_REGION")
    if isinstance(region, str):
        shown["SAGEMAKER_REGION"] = region
    if environ.get("SAGEMAKER_TRAINING_MODULE", "").startswith(_TENSORFLOW_MODULE):
        shown |= _OF_TENSORFLOW | ({"S3_REGION": region} if isinstance(region, str) else {})
    environment = shown | {name: value for name, value in environ.items() if name not in _INTERNAL}
    if contract.code_dir in (contract.paths.code, contract.paths.code_channel):
        parts = [str(contract.code_dir), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(parts))
    for name, value in environment.items():
        size = len(os.fsencode(name)) + 1 + len(os.fsencode(value))
        if size > VARIABLE_BYTES_MAX:
            raise ConfigError(
                f"the variable takes {size} bytes",
                f"at most {VARIABLE_BYTES_MAX}, which is all that Linux takes",
                key=name,
                hint="shorten the hyperparameters, or read large settings from a file in a channel",
            )
    return environment


def _sagemaker_variables(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    properties = _properties(contract, environ)
    own = users_own(contract.hyperparameters)
    names = {
        "hosts": "hosts",
        "network_interface_name": "network_interface_name",
        "hps": "hyperparameters",
        "user_entry_point": "user_entry_point",
        "framework_params": "additional_framework_parameters",
        "resource_config": "resource_config",
        "input_data_config": "input_data_config",
        "output_data_dir": "output_data_dir",
        "current_host": "current_host",
        "current_instance_type": "current_instance_type",
        "current_instance_group": "current_instance_group",
        "current_instance_group_hosts": "current_instance_group_hosts",
        "instance_groups": "instance_groups",
        "instance_groups_dict": "instance_groups_dict",
        "distribution_instance_groups": "distribution_instance_groups",
        "is_hetero": "is_hetero",
        "module_name": "module_name",
        "log_level": "log_level",
        "framework_module": "framework_module",
        "input_dir": "input_dir",
        "input_config_dir": "input_config_dir",
        "output_dir": "output_dir",
        "model_dir": "model_dir",
        "output_intermediate_dir": "output_intermediate_dir",
        "num_cpus": "num_cpus",
        "num_gpus": "num_gpus",
        "num_neurons": "num_neurons",
        "module_dir": "module_dir",
    }
    values: dict[str, Any] = {name: properties[source] for name, source in names.items()}
    values["channels"] = sorted(contract.channels)
    values["training_env"] = properties
    values["user_args"] = list(contract.arguments)
    if properties["topology"]:
        values["topology"] = properties["topology"]
    values |= {f"channel_{name}": str(path) for name, path in contract.channels.items()}
    values |= {f"hp_{name}": value for name, value in own.items()}
    return {f"SM_{name.upper()}": _text(value) for name, value in values.items()}


def _properties(contract: Contract, environ: Mapping[str, str]) -> dict[str, Any]:
    """What SM_TRAINING_ENV holds; most of it is a variable of its own as well."""
    config, paths, given = contract.resource_config, contract.paths, contract.hyperparameters
    groups = instance_groups(config)
    group = config.get("current_group_name") or "homogeneousCluster"
    by_name = {str(each["instance_group_name"]): each for each in groups}
    distributed = _distribution_groups(given, group)
    hosts = list(config["hosts"])
    entry = contract.entry
    return {
        "additional_framework_parameters": framework_parameters(given),
        "channel_input_dirs": {name: str(path) for name, path in contract.channels.items()},
        "current_host": contract.current_host,
        "current_instance_group": group,
        "current_instance_group_hosts": list(by_name.get(group, {}).get("hosts", [])),
        "current_instance_type": config.get("current_instance_type") or "local",
        "distribution_hosts": _distribution_hosts(config, distributed),
        "distribution_instance_groups": distributed,
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "hosts": hosts,
        "hyperparameters": users_own(given),
        "input_config_dir": str(paths.input_config),
        "input_data_config": dict(contract.input_data_config),
        "input_dir": str(paths.input),
        "instance_groups": list(by_name),
        "instance_groups_dict": by_name,
        "is_hetero": len(groups) > 1,
        "is_master": contract.is_chief,
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": shutil.which("smddprun", path=environ.get("PATH")) is not None,
        "job_name": environ.get(_JOB_VARIABLE),
        "log_level": given.get("sagemaker_container_log_level", _LOG_LEVEL),
        "master_hostname": contract.hosts[0],
        "model_dir": str(paths.model),
        "module_dir": given.get("sagemaker_submit_directory") or str(contract.code_dir),
        "module_name": entry.removesuffix(".py"),
        "network_interface_name": contract.network_interface_name,
        "num_cpus": os.cpu_count() or 1,
        "num_gpus": count_gpus(),
        "num_neurons": 0,
        "output_data_dir": str(paths.output_data),
        "output_dir": str(paths.output),
        "output_intermediate_dir": str(paths.output_intermediate),
        "resource_config": dict(config),
        "topology": config.get("topology", []),
        "user_entry_point": entry,
    }


def _distribution_groups(given: Mapping[str, Any], own: str) -> list[str]:
    named = given.get(_DISTRIBUTION_GROUPS)
    if named is None:
        return [own] if any(is_true(given.get(key)) for key in _DISTRIBUTIONS) else []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        where = "hyperparameters.json"
        raise ConfigError(f"found {show(named)}", "a list of instance groups", file=where, key=_DISTRIBUTION_GROUPS)
    return named


def _distribution_hosts(config: Mapping[str, Any], distributed: list[str]) -> list[str]:
    """Members of the groups that take part; without any groups, as in local mode, all hosts."""
    groups = instance_groups(config)
    if not groups:
        return list(config["hosts"])
    return [host for group in groups if group["instance_group_name"] in distributed for host in group["hosts"]]


def _text(value: object) -> str:
    """A value as the toolkit writes it into a variable."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
