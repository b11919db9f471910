"""What SageMaker tells a container: the only code that knows /opt/ml and that reads the environment.

What lives here: the platform's files, variables and reserved hyperparameters, and what of them the user's script is
shown. What must never enter: a policy's meaning, and any default that a policy should hold.
Start reading at `load_contract`.
"""

from __future__ import annotations

from keepstep.intake.contract.environment import read_environment, user_environment
from keepstep.intake.contract.groups import parts_of
from keepstep.intake.contract.load import find_code, load_contract, read_hosts
from keepstep.intake.contract.mpi import read_mpi
from keepstep.intake.contract.strategy import choose_strategy, count_gpus
from keepstep.intake.contract.values import BASE, CodeSource, Contract, ContractOptions, Paths

__all__ = [
    "BASE",
    "CodeSource",
    "Contract",
    "ContractOptions",
    "Paths",
    "choose_strategy",
    "count_gpus",
    "find_code",
    "load_contract",
    "parts_of",
    "read_environment",
    "read_hosts",
    "read_mpi",
    "user_environment",
]
