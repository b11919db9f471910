"""How a worker is launched: job and rank table to its command line and environment.

What lives here: pure functions, one module per strategy that needs to describe a world to TensorFlow. What must never
enter: starting a process, the environment of the agent itself, a file. Start reading at `plan_worker`.
"""

from __future__ import annotations

from keepstep.core.job import EntryKind, JobSpec
from keepstep.core.launch.multi_worker import tf_config
from keepstep.core.policy import Policy

_HEARTBEATS = 2.0
"""TensorFlow gives a silent peer up after so many leases: keepstep is to know first."""
_FLAGS: dict[EntryKind, tuple[str, ...]] = {"script": (), "module": ("-m",), "command": ("--exec",)}


def worker_command(job: JobSpec) -> tuple[str, ...]:
    """What starts the worker-side bootstrap with the user's own interpreter; the script and its arguments follow."""
    return job.python, "-m", "keepstep_worker"


def plan_worker(
    job: JobSpec, generation: int, addresses: tuple[str, ...], rank: int, policy: Policy, full: int = 0
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Command and additional environment of this host's worker, in a job of `full` ranks (0: all hosts) when whole.

    The command starts what the user named through the worker-side bootstrap with the user's own interpreter.
    `addresses` are those of the generation's workers in rank order.
    """
    command = (*worker_command(job), *_FLAGS[job.kind], job.script, *job.arguments)
    environment = {
        "KEEPSTEP_GENERATION": str(generation),
        "KEEPSTEP_RANK": str(rank),
        "KEEPSTEP_LOCAL_RANK": "0",
        "KEEPSTEP_WORLD_SIZE": str(len(addresses)),
        "KEEPSTEP_FULL_WORLD": str(full or len(job.hosts)),
        "KEEPSTEP_BATCH": policy.elastic.batch,
        "KEEPSTEP_HEARTBEAT_S": f"{_HEARTBEATS * policy.coordination.lease:g}",
        "KEEPSTEP_REGISTER_S": f"{policy.hang.first_step:g}",
    }
    if job.strategy == "multi_worker":
        environment["TF_CONFIG"] = tf_config(addresses, rank)
    return command, tuple(sorted(environment.items()))
