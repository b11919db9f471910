"""How a worker is launched: job and rank table to its command line and environment.

What lives here: pure functions, one module per strategy that needs to describe a world to TensorFlow. What must never
enter: starting a process, the environment of the agent itself, a file. Start reading at `plan_worker`.
"""

from __future__ import annotations

from keepstep.core.job import PORT_SPAN, EntryKind, JobSpec, port_from
from keepstep.core.launch import data_service, mpi, multi_worker, parameter_server
from keepstep.core.launch.mpi import LAUNCHED
from keepstep.core.launch.parameter_server import SERVED, Task
from keepstep.core.launch.table import RankTable
from keepstep.core.policy import Policy

_HEARTBEATS = 2.0
"""TensorFlow gives a silent peer up after so many leases: keepstep is to know first."""
_FLAGS: dict[EntryKind, tuple[str, ...]] = {"script": (), "module": ("-m",), "command": ("--exec",)}


def worker_command(job: JobSpec) -> tuple[str, ...]:
    """What starts the worker-side bootstrap with the user's own interpreter; the script and its arguments follow."""
    return job.python, "-m", "keepstep_worker"


def plan_worker(
    job: JobSpec, table: RankTable, rank: int, policy: Policy
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Command and additional environment of this host's worker.

    The command starts what the user named through the worker-side bootstrap with the user's own interpreter; where
    mpirun does that, the worker is what starts mpirun or waits for it.
    """
    addresses, command = table.addresses, script_command(job)
    environment = {
        "KEEPSTEP_GENERATION": str(table.generation),
        "KEEPSTEP_RANK": str(rank),
        "KEEPSTEP_LOCAL_RANK": "0",
        "KEEPSTEP_WORLD_SIZE": str(len(addresses)),
        "KEEPSTEP_FULL_WORLD": str(table.full),
        "KEEPSTEP_BATCH": policy.elastic.batch,
        "KEEPSTEP_HEARTBEAT_S": f"{_HEARTBEATS * policy.coordination.lease:g}",
        "KEEPSTEP_REGISTER_S": f"{policy.hang.first_step:g}",
    }
    if table.feeders:
        environment["KEEPSTEP_DATA_SERVICE"] = f"{data_service.PROTOCOL}://{table.feeders[0]}"
    if job.strategy == "multi_worker":
        environment["TF_CONFIG"] = multi_worker.tf_config(addresses, rank)
        if policy.health.repeat is not None:
            environment["KEEPSTEP_FINGERPRINT"] = "on"
    elif job.strategy in SERVED:
        servers = _second(addresses, table.generation)
        environment["TF_CONFIG"] = parameter_server.tf_config(job.strategy, addresses, servers, None)
        environment["KEEPSTEP_INSTRUMENT"] = environment["KEEPSTEP_JOIN"] = "off"  # its variables are on the servers
    elif job.strategy in LAUNCHED:
        environment |= mpi.environment(job, table, rank)
        command = mpi.command(job, table, rank, _script(job))
    return command, tuple(sorted(environment.items()))


def trains(job: JobSpec, rank: int) -> bool:
    """Whether a host of this rank runs a worker that trains; else it serves the one that does."""
    return job.strategy not in SERVED or rank == 0


def stands_by(job: JobSpec) -> bool:
    """Whether a process that has made a worker's imports can become a worker: it can not where others start ranks."""
    return job.kind != "command" and job.strategy not in LAUNCHED


def servers_of(job: JobSpec, rank: int) -> tuple[Task, ...]:
    """The processes that a host runs to serve another one that trains."""
    return parameter_server.servers_of(rank, job.evaluates) if job.strategy in SERVED else ()


def plan_server(job: JobSpec, table: RankTable, task: Task) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Command and additional environment of a process that serves; the same in each life within a generation."""
    rank = task.number + 1 if task.role == "worker" else task.number
    addresses, servers = table.addresses, _second(table.addresses, table.generation)
    environment = {
        "KEEPSTEP_GENERATION": str(table.generation),
        "KEEPSTEP_RANK": str(rank),
        "KEEPSTEP_SERVER": task.role,
        "TF_CONFIG": parameter_server.tf_config(job.strategy, addresses, servers, task),
    }
    own = task.role == "ps" and job.strategy == "parameter_server_v1"
    if task.role != "worker":
        environment["CUDA_VISIBLE_DEVICES"] = "-1"  # the GPUs are the chief's or the worker's on this host
    command = (*worker_command(job), "--serve") if own else script_command(job)
    return command, tuple(sorted(environment.items()))


def plan_feeder(
    job: JobSpec, table: RankTable, task: Task, position: int
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Command and additional environment of a part of tf.data's service, on the feeding host at this position."""
    is_worker = task.role == data_service.FEEDER
    own = _second(table.feeders, table.generation)[position] if is_worker else table.feeders[0]
    environment = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "KEEPSTEP_DATA_SERVICE": f"{data_service.PROTOCOL}://{table.feeders[0]}",
        "KEEPSTEP_GENERATION": str(table.generation),
        "KEEPSTEP_LISTEN": own,
        "KEEPSTEP_RUN": table.run,
        "KEEPSTEP_SERVER": task.role,
    }
    return (*worker_command(job), "--feed", task.role), tuple(sorted(environment.items()))


def script_command(job: JobSpec) -> tuple[str, ...]:
    """What starts the script by the worker-side bootstrap; the same whatever world it is to be in."""
    return (*worker_command(job), *_script(job))


def _script(job: JobSpec) -> tuple[str, ...]:
    return (*_FLAGS[job.kind], job.script, *job.arguments)


def _second(addresses: tuple[str, ...], generation: int) -> tuple[str, ...]:
    """A second address on each host: the parameter server's. No generation near this one has it."""
    parts = [address.rpartition(":") for address in addresses]
    bases = [(host, int(port) - generation % PORT_SPAN) for host, _, port in parts]
    return tuple(f"{host}:{port_from(base, generation + PORT_SPAN // 2)}" for host, base in bases)
