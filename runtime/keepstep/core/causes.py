"""Why something failed: one enum for policies, metrics and logs."""

from __future__ import annotations

from enum import StrEnum


class FailureCause(StrEnum):
    """The cause of a failure, as far as it is known."""

    USER_CODE = "user_code"
    """The script raised, or exited with a code of its own."""
    KILLED = "killed"
    """A signal that keepstep did not send."""
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    GPU_FAULT = "gpu_fault"
    AGENT_LOST = "agent_lost"
    HOST_LOST = "host_lost"
    LEASE_LOST = "lease_lost"
    STORE = "store"
    PEER = "peer"
    """The victim of another worker's failure."""
    UNKNOWN = "unknown"
