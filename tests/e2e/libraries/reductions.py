"""What the stand-ins for Horovod and for SageMaker's data parallel library have in common: MPI's own reductions."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

# Hosts that share a machine would share Open MPI's files in /dev/shm, whose names tell ranks of one host apart only.
os.environ["OMPI_MCA_btl_vader_backing_directory"] = tempfile.mkdtemp(prefix=os.environ["SM_CURRENT_HOST"])  # noqa: SIM112

from mpi4py import MPI

Sum = "sum"


def init() -> None:
    assert MPI.Is_initialized()


def rank() -> int:
    return int(MPI.COMM_WORLD.Get_rank())


def size() -> int:
    return int(MPI.COMM_WORLD.Get_size())


def local_rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])


def allreduce(tensor: Any, op: str = Sum) -> Any:
    """The sum over all ranks, in a traced function too."""
    assert op == Sum

    def reduce(own: np.ndarray) -> np.ndarray:
        whole = np.empty_like(own)
        MPI.COMM_WORLD.Allreduce(np.ascontiguousarray(own), whole)
        return whole

    reduced = tf.numpy_function(reduce, [tensor], tensor.dtype)
    reduced.set_shape(tensor.shape)
    return reduced


def broadcast_variables(variables: Any, root_rank: int) -> None:
    for variable in variables:
        variable.assign(MPI.COMM_WORLD.bcast(np.asarray(variable), root_rank))
