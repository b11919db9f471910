"""Hyperparameters: decoded as AWS's toolkit decodes them, and turned into a script's arguments as it does.

Source: sagemaker-training 5.1.4, `mapping.to_cmd_args`: keys sorted, one-letter keys with one dash, JSON
values as Python shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from keepstep.intake.contract.documents import Document

RESERVED_PREFIXES = ("sagemaker_", "keepstep_")
RESERVED = frozenset({"default_user_module_name", "_tuning_objective_metric"})
TOOLKITS_OWN = frozenset(
    {
        "sagemaker_program",
        "sagemaker_submit_directory",
        "sagemaker_enable_cloudwatch_metrics",
        "sagemaker_region",
        "sagemaker_container_log_level",
        "sagemaker_job_name",
        "sagemaker_s3_output",
        *RESERVED,
    }
)
"""What the toolkit keeps from SM_FRAMEWORK_PARAMS."""


def parse_hyperparameters(document: Document) -> dict[str, Any]:
    """Decode each value; what is not JSON is the string that it is.

    Raises:
        ConfigError: a key or value can not be given to a process.
    """
    decoded: dict[str, Any] = {}
    for key, raw in document.values.items():
        if not key or "=" in key:
            raise document.error(key, f"found the name {key!r}", "a name without =, not empty")
        value = decode(raw)
        document.check(key, value)
        decoded[key] = value
    return decoded


def decode(raw: object) -> Any:
    """The JSON value behind a string, or the string."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


def users_own(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that are meant for the script."""
    return {
        key: value
        for key, value in hyperparameters.items()
        if not key.startswith(RESERVED_PREFIXES) and key not in RESERVED
    }


def framework_parameters(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The reserved ones that the toolkit shows as SM_FRAMEWORK_PARAMS."""
    return {
        key: value for key, value in hyperparameters.items() if key.startswith("sagemaker_") and key not in TOOLKITS_OWN
    }


def to_arguments(hyperparameters: Mapping[str, Any]) -> tuple[str, ...]:
    """A script's arguments: `--key value`, `-k value` for one letter, in the order of the keys."""
    words: list[str] = []
    for key in sorted(hyperparameters):
        words += [f"-{key}" if len(key) == 1 else f"--{key}", _argument(hyperparameters[key])]
    return tuple(words)


def is_true(value: object) -> bool:
    """Whether a switch among the hyperparameters is on; "true" said as a string counts."""
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _argument(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))
    return str(value)
