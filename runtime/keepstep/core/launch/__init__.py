"""JobSpec and rank table to the command line and environment of a worker. Pure; one module per strategy.

Start reading at `plan_worker`.
"""

from __future__ import annotations

from keepstep.core.job import JobSpec
from keepstep.core.launch.multi_worker import tf_config
from keepstep.core.records import GenerationRecord


def plan_worker(job: JobSpec, generation: GenerationRecord, rank: int) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Command and additional environment of this host's worker.

    The command starts the user's script through the worker-side bootstrap with the user's own interpreter.
    """
    command = (job.python, "-m", "keepstep_worker", job.script, *job.arguments)
    environment = {
        "KEEPSTEP_GENERATION": str(generation.number),
        "KEEPSTEP_RANK": str(rank),
        "KEEPSTEP_LOCAL_RANK": "0",
        "KEEPSTEP_WORLD_SIZE": str(len(generation.ranks)),
    }
    if job.strategy == "multi_worker":
        environment["TF_CONFIG"] = tf_config(generation.ranks, rank)
    return command, tuple(sorted(environment.items()))
