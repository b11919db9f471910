"""Jobs as the platform and its users write them down, made from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE = "sagemaker_tensorflow_container.training:main"
_VALUES = (
    "3", "1e-3", "0.5", "true", "false", "null", "[1, 2, \"x\"]", '{"b": 2, "a": [1, {"c": null}]}', '"a b"', "",
    "a b $HOME", "it's", 'say "no"', "line\nbreak", "späß ✓", "--not-an-option", "-", "x" * 400, "007", "1_000",
    "NaN", "[unfinished", "'single'", "a;b&&c|d>e", "*", "~", "\\n", "%s {0}", '"quoted \\"inside\\""',
)  # fmt: skip
_KEYS = (
    "epochs", "lr", "batch-size", "x", "n", "model_dir", "train.steps", "UPPER", "under_score", "a b", "é", "data", "2",
)  # fmt: skip
_RESERVED: dict[str, tuple[str, ...]] = {
    "sagemaker_container_log_level": ("20", "10", "30"),
    "sagemaker_job_name": ('"a-name"', "raw-name"),
    "sagemaker_region": ('"eu-west-1"', "us-east-1"),
    "sagemaker_enable_cloudwatch_metrics": ("false", "true"),
    "sagemaker_estimator_class_name": ('"TensorFlow"',),
    "sagemaker_estimator_module": ('"sagemaker.tensorflow.estimator"',),
    "sagemaker_distribution_instance_groups": ('["workers"]', "[]"),
    "sagemaker_instance_type": ('"ml.p4d.24xlarge"',),
    "default_user_module_name": ('"mine"',),
}


@dataclass(frozen=True)
class Job:
    """What is written into /opt/ml and into the environment, beside what each tool needs for itself.

    Attributes:
        hyperparameters: as in the file: text by name.
        resources: as in the file.
        channels: as in the file.
        environ: what the platform sets.
    """

    hyperparameters: dict[str, str]
    resources: dict[str, Any]
    channels: dict[str, Any]
    environ: dict[str, str]

    @property
    def hosts(self) -> int:
        return len(self.resources["hosts"])

    def write(self, base: Path) -> None:
        """Lay it out below `base`, with a script that tells what it sees."""
        config = base / "input" / "config"
        config.mkdir(parents=True)
        (config / "hyperparameters.json").write_text(json.dumps(self.hyperparameters))
        (config / "resourceconfig.json").write_text(json.dumps(self.resources))
        (config / "inputdataconfig.json").write_text(json.dumps(self.channels))
        code = base / "code"
        (code / "sub").mkdir(parents=True)
        for name in ("train.py", "sub/train.py"):
            (code / name).write_text(TELLING)
        for name in ("run.sh", "program"):
            (code / name).write_text('#!/bin/sh\nexec "$TOLD_BY" train.py "$0" "$@"\n')
        for name in self.channels:
            (base / "input" / "data" / name).mkdir(parents=True)


TELLING = """
import json, os, sys
told = {"environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "name": __name__,
        "file": os.path.realpath(__file__), "path": sys.path[0], "stdin": os.path.realpath("/proc/self/fd/0")}
with open(os.environ["TOLD_TO"], "w") as file:
    json.dump(told, file)
"""


def make_job(seed: int, hosts: int = 1) -> Job:
    """A job of so many hosts; equal seeds give equal jobs."""
    chance = random.Random(seed)
    hyperparameters = {"sagemaker_program": chance.choice(_PROGRAMS[: None if hosts == 1 else 3])}
    for key in chance.sample(_KEYS, chance.randint(0, 6)):
        hyperparameters[key] = "/opt/ml/model" if key == "model_dir" else chance.choice(_VALUES)
    for key in chance.sample(sorted(_RESERVED), chance.randint(0, 4)):
        hyperparameters[key] = chance.choice(_RESERVED[key])
    environ: dict[str, str] = {"SAGEMAKER_TRAINING_MODULE": MODULE}
    if chance.random() < 0.7:
        environ["TRAINING_JOB_NAME"] = f"job-{seed}"
    if chance.random() < 0.5:
        environ["AWS_REGION"] = "eu-central-1"
    if chance.random() < 0.3:
        environ["USERS_OWN"] = chance.choice([value for value in _VALUES if "\n" not in value])
    if chance.random() < 0.2:
        environ["SAGEMAKER_PROGRAM"] = "sub/train.py"
    if chance.random() < 0.2:
        environ["PYTHONPATH"] = "/somewhere:/else"
    if hosts > 1 or chance.random() < 0.3:
        hyperparameters["sagemaker_multi_worker_mirrored_strategy_enabled"] = chance.choice(["true", "true", "false"])
    resources = _resources(chance, hosts)
    if len(resources.get("instance_groups", ())) > 1:
        hyperparameters["sagemaker_distribution_instance_groups"] = '["workers"]'
    return Job(hyperparameters, resources, _channels(chance), environ)


_PROGRAMS = ("train.py", '"train.py"', "sub/train.py", '"run.sh"', "program")


def _resources(chance: random.Random, hosts: int) -> dict[str, Any]:
    names = sorted(f"algo-{number}" for number in range(1, hosts + 1))
    found: dict[str, Any] = {"current_host": chance.choice(names), "hosts": names}
    if chance.random() < 0.8:
        found["network_interface_name"] = chance.choice(["eth0", "ethwe", "lo"])
    if chance.random() < 0.3:
        return found | {"current_instance_type": "local"} if chance.random() < 0.5 else found
    kinds = ["ml.p4d.24xlarge", "ml.c5.xlarge"]
    split = chance.randint(1, hosts) if hosts > 1 and chance.random() < 0.5 else hosts
    found["current_host"] = chance.choice(names[:split])  # another one has no part in the training
    members = [names[:split], names[split:]]
    groups = [
        {"instance_group_name": name, "instance_type": kind, "hosts": each}
        for name, kind, each in zip(("workers", "feeders"), kinds, members, strict=True)
        if each
    ]
    mine = next(group for group in groups if found["current_host"] in group["hosts"])
    return found | {
        "current_group_name": mine["instance_group_name"],
        "current_instance_type": mine["instance_type"],
        "instance_groups": groups,
        "topology": chance.choice([None, [{"hostName": names[0], "capacityUnitId": "u-1"}]]),
    }


def _channels(chance: random.Random) -> dict[str, Any]:
    names = chance.sample(["train", "validation", "Data-1", "a.b", "model"], chance.randint(0, 3))
    mode = chance.choice(["File", "FastFile", "Pipe"])
    return {name: {"TrainingInputMode": mode, "S3DistributionType": "FullyReplicated"} for name in names}
