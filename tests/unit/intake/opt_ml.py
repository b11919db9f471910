"""A folder that looks like /opt/ml."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError

RESOURCES = {
    "current_host": "algo-1",
    "current_instance_type": "ml.c5.xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-1", "algo-10", "algo-2"],
    "instance_groups": [
        {
            "instance_group_name": "homogeneousCluster",
            "instance_type": "ml.c5.xlarge",
            "hosts": ["algo-1", "algo-10", "algo-2"],
        }
    ],
    "network_interface_name": "eth0",
    "topology": None,
}
HYPERPARAMETERS = {"sagemaker_program": '"train.py"', "epochs": "3"}


def attempt(parse: Callable[[], Any]) -> tuple[Any, str]:
    """What came of it, or the text of the error; any other exception is a fault."""
    try:
        return parse(), ""
    except ConfigError as error:
        return None, str(error)


def make_opt_ml(base: Path, resources=RESOURCES, hyperparameters=HYPERPARAMETERS, channels=None, code="code") -> Path:
    """Write the files a job has; text and bytes are written as they are, None leaves a file out."""
    config = base / "input" / "config"
    config.mkdir(parents=True)
    for name, content in (
        ("resourceconfig", resources),
        ("hyperparameters", hyperparameters),
        ("inputdataconfig", channels),
    ):
        if content is not None:
            data = content if isinstance(content, str | bytes) else json.dumps(content, indent=1)
            (config / f"{name}.json").write_bytes(data if isinstance(data, bytes) else data.encode())
    folder = base / code
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("print('training')\n")
    return base
