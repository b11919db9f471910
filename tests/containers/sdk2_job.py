"""One job by SDK v2's local mode: `sdk2_job.py SOURCE STEPS GATE ENVIRONMENT FOLDER`; as sdk3_job.py."""

from __future__ import annotations

import json
import sys

from sagemaker.estimator import Estimator
from sagemaker.local import LocalSession

from keepstep.sdk import Keepstep


def main() -> None:
    source, steps, gate, environment, folder = sys.argv[1:]
    session = LocalSession()
    session.config = {"local": {"local_code": True, "container_root": folder}}
    job = Keepstep("loop.py", source, environment=json.loads(environment))
    estimator = Estimator(
        image_uri="keepstep",
        role="arn:aws:iam::123456789012:role/trainer",
        instance_count=2,
        instance_type="local",
        sagemaker_session=session,
        base_job_name="digits",
        hyperparameters={"steps": int(steps), "out": "/opt/ml/model", **({"gate": gate} if gate else {})},
        **job.estimator(),
    )
    estimator.fit(wait=True)


if __name__ == "__main__":
    main()
