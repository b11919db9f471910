"""What the SageMaker SDK is given so that keepstep runs its job: version 3's ModelTrainer, version 2's estimators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args

from keepstep.core.values import frozen
from keepstep.errors import ConfigError

Way = Literal["command", "image", "distributed"]
"""`command`: the SDK's start script hands over to keepstep, which becomes process 1 and hears SIGTERM. `image`: the
image's own ENTRYPOINT, without the start script. `distributed`: a driver below the start script, whose bash stays
process 1: a stop reaches nobody and saves nothing."""


@frozen
class Keepstep:
    """A script that keepstep is to run, as the SageMaker SDK wants to hear of it.

        job = Keepstep("train.py", "src", policy="spot", store="s3://bucket/prefix", name="digits")
        ModelTrainer(training_image=image, compute=compute, **job.model_trainer())
        Estimator(image_uri=image, role=role, instance_count=2, instance_type=type, **job.estimator())

    The image has keepstep in it (docker/Dockerfile). Hyperparameters are the SDK's own to give; the script gets them as
    its arguments.

    Attributes:
        script: a file in `source`.
        source: the folder of the code.
        policy: a preset's name, or a YAML file in `source`.
        store: s3://bucket/prefix for checkpoints; None: as the policy says.
        name: under which checkpoints are kept, so that a later job of the same name goes on; None: the job's own.
        settings: knobs of the policy by name, as {"checkpoint.every": "2min"}.
        environment: more variables for the container.
    """

    script: str
    source: str
    policy: str = "default"
    store: str | None = None
    name: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look at what the SDK would find out in the cloud only.

        Raises:
            ConfigError: a file is not there.
        """
        folder = Path(self.source)
        if not (folder / self.script).is_file():
            raise ConfigError(f"{folder / self.script} is not there", "a script in the code's folder", key="script")
        if self.policy.endswith((".yaml", ".yml")) and not (folder / self.policy).is_file():
            raise ConfigError(f"{folder / self.policy} is not there", "a file in the code's folder", key="policy")

    def model_trainer(self, way: Way = "command") -> dict[str, Any]:
        """Arguments for `sagemaker.train.ModelTrainer`; what the caller gives beside them is the caller's own.

        Raises:
            ConfigError: the SDK is not installed, or the way can not do what is asked for.
        """
        if way not in get_args(Way):
            raise ConfigError(f"found {way!r}", " or ".join(get_args(Way)), key="way")
        try:
            from sagemaker.train.configs import InputData, SourceCode
        except ImportError as error:
            raise ConfigError(
                f"{error}", "version 3 of the SDK: pip install 'keepstep[sdk]'", key="sagemaker"
            ) from error
        if way == "distributed":
            from keepstep.sdk.distributed import KeepstepDriver

            code = SourceCode(source_dir=self.source, entry_script=self.script)
            driver = KeepstepDriver(settings=[f"{knob}={value}" for knob, value in self.settings.items()])
            return {"source_code": code, "distributed": driver, "environment": self._environment()}
        environment = {**self._environment(), "SAGEMAKER_PROGRAM": self.script}
        if way == "image":
            if self.settings:
                wanted = "a policy file: nothing can be said to the image's own ENTRYPOINT"
                raise ConfigError(f"found {', '.join(self.settings)}", wanted, key="settings")
            channel = InputData(channel_name="code", data_source=self.source)
            return {"input_data_config": [channel], "environment": environment}
        code = SourceCode(source_dir=self.source, command="exec keepstep train", args=self._words())
        return {"source_code": code, "environment": environment}

    def estimator(self) -> dict[str, Any]:
        """Arguments for version 2's `sagemaker.estimator.Estimator` or `sagemaker.tensorflow.TensorFlow`."""
        told = {"entry_point": self.script, "source_dir": self.source, "environment": self._environment()}
        return told | ({"container_arguments": ["train", *self._words()]} if self.settings else {})

    def _words(self) -> list[str]:
        return [word for knob, value in self.settings.items() for word in ("--set", f"{knob}={value}")]

    def _environment(self) -> dict[str, str]:
        own = {"KEEPSTEP_POLICY": self.policy, "KEEPSTEP_STORE": self.store, "KEEPSTEP_JOB_NAME": self.name}
        return {name: value for name, value in own.items() if value is not None} | dict(self.environment)
