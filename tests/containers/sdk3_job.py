"""One job by SDK v3 in local container mode: `sdk3_job.py WAY SOURCE STEPS GATE ENVIRONMENT FOLDER`.

Runs in an environment of its own, with the `sagemaker` package in it. ENVIRONMENT is a JSON object.
"""

from __future__ import annotations

import json
import sys

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute
from sagemaker.train.model_trainer import Mode

from keepstep.sdk import Keepstep


def main() -> None:
    way, source, steps, gate, environment, folder = sys.argv[1:]
    job = Keepstep("loop.py", source, environment=json.loads(environment))
    trainer = ModelTrainer(
        training_mode=Mode.LOCAL_CONTAINER,
        training_image="keepstep",
        base_job_name="digits",
        role="arn:aws:iam::123456789012:role/trainer",
        compute=Compute(instance_type="local_cpu", instance_count=2),
        local_container_root=folder,
        hyperparameters={"steps": int(steps), "out": "/opt/ml/model", **({"gate": gate} if gate else {})},
        **job.model_trainer(way),
    )
    trainer.train(wait=True)


if __name__ == "__main__":
    main()
