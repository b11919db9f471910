"""What the platform says of the ranks that mpirun is to start."""

from __future__ import annotations

from typing import Any

from keepstep.core.job import MpiSpec
from keepstep.core.launch.mpi import LAUNCHED
from keepstep.errors import ConfigError
from keepstep.intake.contract.values import Contract
from keepstep.intake.files import printable, show

_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
_TOTAL = "sagemaker_mpi_num_processes"
_OPTIONS = {
    "horovod": "sagemaker_mpi_custom_mpi_options",
    "smddp": "sagemaker_distributed_dataparallel_custom_mpi_options",
}
_NCCL = "--NCCL_DEBUG"
_PROCESSES_MAX = 1024


def read_mpi(
    contract: Contract, strategy: str, processes: int, gpus: int, hosts: int, has_smddprun: bool
) -> MpiSpec | None:
    """How many ranks, and what mpirun is told beside; None for a strategy that does without mpirun.

    A rank for each GPU, or one where there is none, unless the hyperparameters say otherwise; or unless the policy
    does, by `processes`, of which 0 is none.

    Raises:
        ConfigError: a hyperparameter can not be used.
    """
    if strategy not in LAUNCHED:
        return None
    given = contract.hyperparameters
    text = given.get(_OPTIONS[strategy]) or ""
    if not isinstance(text, str):
        raise _wrong(contract, _OPTIONS[strategy], text, "words for mpirun, as one string")
    options, nccl_debug = _split(contract, strategy, text)
    total = _count(contract, _TOTAL) if strategy == "horovod" and not processes else 0
    each = processes or _count(contract, _PER_HOST) or gpus or 1
    if total and not each * (hosts - 1) < total <= each * hosts:
        wanted = f"{each * (hosts - 1) + 1} to {each * hosts}: {hosts} hosts of {each}, none without a rank"
        raise _wrong(contract, _TOTAL, total, wanted)
    named = given.get("sagemaker_instance_type") if strategy == "smddp" else None
    instance_type = named or contract.resource_config.get("current_instance_type") or "local"
    return MpiSpec(
        processes=each,
        interface=contract.network_interface_name,
        instance_type=str(instance_type),
        options=options,
        nccl_debug=nccl_debug,
        total=total,
        has_smddprun=has_smddprun,
    )


def _split(contract: Contract, strategy: str, text: str) -> tuple[tuple[str, ...], str]:
    """The words, and what they say of NCCL, which the toolkit takes out of them."""
    kept, nccl_debug, words = [], "INFO", iter(text.split())
    for word in words:
        name, equals, value = word.partition("=")
        if name != _NCCL:
            kept.append(word)
            continue
        nccl_debug = value if equals else next(words, "")
        if not nccl_debug:
            raise _wrong(contract, _OPTIONS[strategy], text, f"a level behind {_NCCL}, such as WARN")
    return tuple(kept), nccl_debug


def _count(contract: Contract, key: str) -> int:
    """A number of ranks; 0 where nothing is said."""
    value = contract.hyperparameters.get(key)
    if value in (None, ""):
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _PROCESSES_MAX:
        raise _wrong(contract, key, value, f"a number of ranks from 1 to {_PROCESSES_MAX}")
    return value


def _wrong(contract: Contract, key: str, found: Any, wanted: str) -> ConfigError:
    file = printable(str(contract.paths.input_config / "hyperparameters.json"))
    return ConfigError(f"found {show(found)}", wanted, file=file, key=key)
