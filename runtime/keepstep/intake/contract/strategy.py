"""How the script is to be distributed, as far as the platform's word for it goes."""

from __future__ import annotations

import re
from pathlib import Path

from keepstep.core.launch.mpi import LAUNCHED
from keepstep.core.launch.parameter_server import SERVED
from keepstep.errors import ConfigError
from keepstep.intake.contract.hyperparameters import is_true
from keepstep.intake.contract.values import Contract

MULTI_WORKER = "sagemaker_multi_worker_mirrored_strategy_enabled"
PARAMETER_SERVER = "sagemaker_parameter_server_enabled"
MPI = "sagemaker_mpi_enabled"
DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"
_OF_ONE = ("plain", "mirrored")
_GPU = re.compile(r"nvidia\d+")


def choose_strategy(contract: Contract, wanted: str, gpus: int, hosts: int = 0) -> str:
    """The strategy to launch: the policy's, or with `auto` what hyperparameters, hosts and GPUs say.

    Args:
        hosts: how many of the job's train, 0 for all of them.

    Raises:
        ConfigError: what is asked for does not fit the hosts.
    """
    hosts, given = hosts or len(contract.hosts), contract.hyperparameters
    if wanted != "auto":
        if wanted in _OF_ONE and hosts > 1:
            several = f"{', '.join(('multi_worker', *SERVED, *LAUNCHED))} or auto"
            raise ConfigError(f"found {wanted} with {hosts} hosts", several, key="launch.strategy")
        if wanted in SERVED and hosts == 1:
            raise ConfigError(f"found {wanted} with one host", "two hosts or more, or auto", key="launch.strategy")
        return wanted
    if hosts > 1 and is_true(given.get(PARAMETER_SERVER)):
        return "parameter_server_v1"
    if is_true(given.get(MPI)):
        return "horovod"
    if is_true(given.get(DATA_PARALLEL)):
        return "smddp"
    if hosts > 1 or is_true(given.get(MULTI_WORKER)):
        return "multi_worker"
    return "mirrored" if gpus > 1 else "plain"


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this container was given, by their device files: no driver is asked, nothing can hang."""
    try:
        return sum(1 for path in devices.iterdir() if _GPU.fullmatch(path.name))
    except OSError:
        return 0
