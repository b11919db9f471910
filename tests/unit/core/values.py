"""Values of the core for tests: short to write, complete enough to decide on."""

from __future__ import annotations

from hypothesis import strategies as st

from keepstep.core.causes import FailureCause
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.records import AckRecord, Failure, GenerationRecord, Held, LedgerEntry, Member, Phase
from keepstep.core.state import State, Turn

MEMBERS = (Member("algo-1", "one"), Member("algo-2", "two"))


def a_job(**changes: object) -> JobSpec:
    values = {
        "name": "job", "host": "algo-1", "hosts": ("algo-1", "algo-2"), "node_id": "one", "boot": 0,
        "address": "10.0.0.1", "port_base": 20000, "run": "run1", "strategy": "multi_worker", "python": "python3",
        "script": "train.py", "arguments": ("--epochs", "3"), "has_store": True, "etcd_hosts": ("algo-1",),
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


def a_policy(**restart: object) -> Policy:
    return Policy.model_validate({"restart": restart})


def a_turn(policy: Policy | None = None, now: float = 1_000.0, **job: object) -> Turn:
    return Turn(State(a_job(**job), policy or Policy(), now), now)


def a_generation(**changes: object) -> GenerationRecord:
    return GenerationRecord(**{"number": 3, "phase": Phase.FORMING, "leader": "one", "members": MEMBERS, **changes})


def a_failure(at: float = 10.0, cause: FailureCause = FailureCause.USER_CODE, **changes: object) -> Failure:
    values = {"host": "algo-1", "rank": 0, "step": 7, "exit_code": 1, "error_type": "ValueError", "message": "bad"}
    return Failure(cause, at=at, **{**values, **changes})


def an_entry(failure: Failure) -> LedgerEntry:
    return LedgerEntry(failure.at, failure.cause, failure.signature, failure.step)


def an_ack(host: str, *held: tuple[int, str], **changes: object) -> AckRecord:
    return AckRecord(3, host, f"node of {host}", held=tuple(Held(*each) for each in held), **changes)


failures = st.builds(
    Failure,
    cause=st.sampled_from(FailureCause),
    host=st.sampled_from(["algo-1", "algo-2", "algo-10"]),
    at=st.floats(0, 1e6),
    rank=st.integers(-1, 3),
    step=st.integers(0, 100),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    error_type=st.sampled_from(["", "ValueError", "UnavailableError"]),
    message=st.text(max_size=20),
    victim=st.booleans(),
)
