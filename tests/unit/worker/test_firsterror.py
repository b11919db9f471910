"""Victims are told from culprits by type and text; what is written is bounded and whole."""

from __future__ import annotations

import json

import pytest

from keepstep_worker import firsterror


class Stranger(Exception):
    """An error of some package."""


def error(name: str, text: str, module: str = "tensorflow.python.framework.errors_impl") -> BaseException:
    return type(name, (Stranger,), {"__module__": module})(text)


ABORTED = "Collective ops is aborted by: "
VICTIMS = [
    ("UnavailableError", "failed to connect to all addresses"),
    ("UnavailableError", ABORTED + "Connection reset by peer\nThe error could be from a previous operation."),
    ("AbortedError", ABORTED + "/job:worker/replica:0/task:1 has been restarted"),
    ("CancelledError", "[_Derived_]RPC error: Socket closed [type.googleapis.com/tensorflow.DerivedStatus='']"),
    ("InternalError", "{{function_node x}} Collective ops is aborted by: tasks are unhealthy"),
    ("InternalError", "Peer /job:worker/replica:0/task:0 is down"),
    ("DeadlineExceededError", "Deadline Exceeded on CoordinationService/Heartbeat"),
    ("InternalError", "Connection refused"),
    ("UnknownError", "Socket closed"),
    ("InternalError", "NCCL: remote process exited or there was a network error. Set NCCL_DEBUG=WARN for detail."),
    ("InternalError", "NCCL: unhandled system error. Set NCCL_DEBUG=WARN for detail."),
    ("FailedPreconditionError", "Coordination service agent is in error"),
]
CULPRITS = [
    ("InvalidArgumentError", "Incompatible shapes: [32,10] vs. [31,10]"),
    ("ResourceExhaustedError", "OOM when allocating tensor with shape[4096,4096]"),
    ("InternalError", "Blas GEMM launch failed"),
    ("InternalError", "NCCL: unhandled cuda error. Set NCCL_DEBUG=WARN for detail."),
    ("AbortedError", "Operation was stopped by the user"),
    ("CancelledError", "The iterator was cancelled"),
    ("DeadlineExceededError", "dequeue timed out"),
    ("InvalidArgumentError", "Connection reset"),
    ("OutOfRangeError", "End of sequence"),
]


@pytest.mark.parametrize(("name", "text"), VICTIMS)
def test_victims(name, text):
    assert firsterror.classify(error(name, text))


@pytest.mark.parametrize(("name", "text"), CULPRITS)
def test_culprits(name, text):
    assert not firsterror.classify(error(name, text))


def test_the_same_name_in_the_users_own_code_is_no_victim():
    assert not firsterror.classify(error("UnavailableError", ABORTED, module="shop.stock"))
    assert not firsterror.classify(ConnectionResetError("Connection reset by peer"))


def test_horovods_error_is_a_victims():
    assert firsterror.classify(error("HorovodInternalError", "ncclCommAbort", module="horovod.common.exceptions"))


def test_a_subclass_counts_and_so_does_the_cause():
    kind = type("Mine", (type(error("UnavailableError", "")),), {"__module__": "mine"})
    assert firsterror.classify(kind("x"))
    outer = RuntimeError("step failed")
    outer.__cause__ = error("UnavailableError", "")
    assert firsterror.classify(outer)


def test_a_circle_of_causes_ends():
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert not firsterror.classify(first)


def raised(message: str) -> BaseException:
    try:
        raise LookupError(message)
    except LookupError as caught:
        return caught


def test_message_and_traceback_are_cut():
    found = firsterror.describe(raised("m" * 9000), rank=1, generation=2, step=3)
    assert (found["type"], found["module"], found["message"]) == ("LookupError", "builtins", "m" * 2000)
    assert found["traceback"] == "m" * 7999 + "\n"
    assert (found["rank"], found["generation"], found["step"], found["victim"]) == (1, 2, 3, False)


def test_the_traceback_names_where_it_was_raised():
    assert "in raised" in firsterror.describe(raised("x"), 0, 0, 0)["traceback"]


def test_an_error_that_can_not_be_shown_is_told_all_the_same():
    kind = type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})
    found = firsterror.describe(kind(), 0, 0, 0)
    assert found["type"] == "Mute"
    assert "failed" in found["message"]


def test_it_is_written_whole_and_an_unwritable_place_is_borne(tmp_path):
    path = tmp_path / "failure.json"
    firsterror.write(str(path), {"type": "x" * 100})
    firsterror.write(str(path), {"type": "y"})
    assert json.loads(path.read_text()) == {"type": "y"}
    firsterror.write(str(tmp_path / "missing" / "failure.json"), {"type": "z"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["failure.json"]
