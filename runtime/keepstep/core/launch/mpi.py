"""Horovod and SageMaker's data parallel library: ranks that mpirun starts on every host.

mpirun runs on the first host; on each other one its daemon, orted, is started through `plm_rsh_agent`, which is
keepstep's own: no sshd. The words are those of AWS's toolkit, in its order, but for what is listed in
entrypoints/README.md. Source: sagemaker-training 5.1.4, `mpi.py` and `smdataparallel.py`.
"""

from __future__ import annotations

from keepstep.core.job import JobSpec, MpiSpec
from keepstep.core.launch.table import RankTable

LAUNCHED = ("horovod", "smddp")
"""The strategies whose ranks mpirun starts."""
_RDMA = frozenset(f"ml.{name}xlarge" for name in ("p4d.24", "p4de.24", "p5.48", "p5e.48", "trn1.32", "p6e-gb200.36"))
_EFA = _RDMA | {f"ml.{name}xlarge" for name in ("g4dn.8", "g4dn.12", "g5.48", "p3dn.24")}
_SMDDP_PORT = 7592


def environment(job: JobSpec, table: RankTable, rank: int) -> dict[str, str]:
    """What tells the hosts of a world how to reach each other; the ranks' own numbers come from mpirun."""
    places = (f"{host}={address}" for host, address in zip(table.hosts, table.addresses, strict=True))
    return {
        "KEEPSTEP_HOST": job.host,
        "KEEPSTEP_FULL_WORLD": str(_ranks(_spec(job), table.full)),
        **({"KEEPSTEP_PLACES": " ".join(places)} if rank == 0 else {"KEEPSTEP_LISTEN": table.addresses[rank]}),
    }


def command(job: JobSpec, table: RankTable, rank: int, script: tuple[str, ...]) -> tuple[str, ...]:
    """What a host's worker runs: mpirun on the first host, on another one what waits to be asked for orted.

    Args:
        script: the user's own, as words of the worker-side bootstrap.
    """
    bootstrap = (job.python, "-m", "keepstep_worker")
    if rank:
        return (*bootstrap, "--orted")
    spec = _spec(job)
    words = _horovod(spec, table) if job.strategy == "horovod" else _smddp(spec, table)
    return (*bootstrap, "--mpirun", *words, *bootstrap, "--rank", *script)


def _horovod(spec: MpiSpec, table: RankTable) -> tuple[str, ...]:
    one = spec.processes == 1
    hosts = table.hosts if one else tuple(f"{host}:{spec.processes}" for host in table.hosts)
    return (
        *_begin(spec, hosts, _ranks(spec, len(hosts))),
        *("--display-map", "--tag-output", *_network(spec), "-bind-to", "none", "-map-by", "slot"),
        *_transport(),
        *_set("NCCL_MIN_NRINGS=4", f"NCCL_SOCKET_IFNAME={spec.interface}", f"NCCL_DEBUG={spec.nccl_debug}"),
        *_set("LD_LIBRARY_PATH", "PATH"),
        *spec.options,
        *(_set("FI_PROVIDER=efa", "NCCL_PROTO=simple") if spec.instance_type in _EFA else ()),
        *(_set("FI_EFA_USE_DEVICE_RDMA=1") if spec.instance_type in _RDMA else ()),
    )


def _ranks(spec: MpiSpec, hosts: int) -> int:
    """How many ranks so many hosts have."""
    whole = spec.processes * hosts
    return min(spec.total, whole) if spec.total else whole


def _smddp(spec: MpiSpec, table: RankTable) -> tuple[str, ...]:
    several = len(table.hosts) > 1
    hosts = tuple(f"{host}:{spec.processes}" for host in table.hosts) if several else table.hosts
    server = (
        f"SMDATAPARALLEL_SERVER_ADDR={table.hosts[0]}",
        f"SMDATAPARALLEL_SERVER_PORT={_SMDDP_PORT}",
        f"SAGEMAKER_INSTANCE_TYPE={spec.instance_type}",
    )
    return (
        *_begin(spec, hosts, spec.processes * len(hosts)),
        *("--tag-output", "--oversubscribe", *_network(spec), *_transport()),
        *("-mca", "plm_rsh_num_concurrent", str(len(hosts))),
        *_set(f"NCCL_SOCKET_IFNAME={spec.interface}", f"NCCL_DEBUG={spec.nccl_debug}", "LD_LIBRARY_PATH", "PATH"),
        *_set(f"SMDATAPARALLEL_USE_{'HOMOGENEOUS' if several else 'SINGLENODE'}=1"),
        *_set("FI_PROVIDER=efa", "RDMAV_FORK_SAFE=1"),
        *spec.options,
        *(_set("NCCL_PROTO=simple") if spec.instance_type in _EFA else ()),
        *(_set("FI_EFA_USE_DEVICE_RDMA=1") if spec.instance_type in _RDMA else ()),
        *(_set(*server) if several else ()),
        *(("smddprun",) if spec.has_smddprun else ()),
    )


def _begin(spec: MpiSpec, hosts: tuple[str, ...], count: int) -> tuple[str, ...]:
    return "mpirun", "--host", ",".join(hosts), "-np", str(count), "--allow-run-as-root"


def _network(spec: MpiSpec) -> tuple[str, ...]:
    names = ("btl_tcp_if_include", "oob_tcp_if_include")
    return (*(word for name in names for word in ("-mca", name, spec.interface)), "-mca", "plm_rsh_no_tree_spawn", "1")


def _transport() -> tuple[str, ...]:
    values = {
        "pml": "ob1",
        "btl": "^openib",
        "orte_abort_on_non_zero_status": "1",
        "btl_vader_single_copy_mechanism": "none",
    }
    return tuple(word for name, value in values.items() for word in ("-mca", name, value))


def _set(*variables: str) -> tuple[str, ...]:
    return tuple(word for variable in variables for word in ("-x", variable))


def _spec(job: JobSpec) -> MpiSpec:
    assert job.mpi is not None, f"{job.strategy} comes with it"
    return job.mpi
