"""Why a worker has ended, by what it wrote down and by what libraries printed."""

from __future__ import annotations

import json
import os
import signal

import pytest

from keepstep.adapters.processes import ExitStatus
from keepstep.app.first_errors import _said, first_error
from keepstep.core.codec import decode_event, encode_event
from keepstep.core.events import WorkerExited
from keepstep.core.values import evolve
from keepstep_worker import firsterror

ABORTED = ExitStatus(None, signal.SIGABRT)
ONE = """\
2026-11-24 17:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to cuInit: \
CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected
2026-11-24 17:00:01.123456: E external/local_xla/xla/stream_executor/cuda/cuda_event.cc:29] Error polling: \
CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered
2026-11-24 17:00:01.123457: F tensorflow/core/common_runtime/device/device_event_mgr.cc:223] Unexpected Event status: 1
Fatal Python error: Aborted
"""
SAID = [
    (
        ONE, "CUDA",
        "Error polling: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered; Unexpected Event status: 1",
        False,
    ),
    (
        "F0000 00:00:1732467600.123456    4242 pjrt_client.cc:88] Check failed: a\n", "TensorFlow", "Check failed: a",
        False,
    ),
    ("F external/local_xla/xla/pjrt/x.cc:8] Non-OK-status: at 0x7f12ab\n", "XLA", "Non-OK-status: at 0x", False),
    (
        "algo-1:77:99 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer\n", "NCCL",
        "socketProgress: Connection closed by remote peer", True,
    ),
    (
        "[1,1]<stderr>:terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        "C++", "'std::bad_alloc'; what():  std::bad_alloc", False,
    ),
    ("double free or corruption (!prev)\n", "glibc", "double free or corruption (!prev)", False),
    (
        "2026-11-24 17:00:00.1: F external/local_tsl/tsl/coordination_service_agent.cc:7] Heartbeat to service lost\n",
        "TensorFlow", "Heartbeat to service lost", True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "library", "message", "victim"), SAID)
def test_what_a_library_said_before_it_ended_the_process(words, library, message, victim, tmp_path):
    status = ExitStatus(None, signal.SIGABRT, last_words=words)
    found = first_error(tmp_path / "none", status, 5.0)
    assert found is not None
    assert (found.error_type, found.message, found.victim, found.at) == (library, message, victim, 5.0)


def test_the_last_of_many_lines_are_told():
    words = "".join(f"h:1:1 [0] NCCL WARN Call {n} failed: Connection closed\n" for n in range(9)) + ONE
    said = _said(words)
    assert said is not None
    library, text, follows = said
    assert (library, text.endswith("; Unexpected Event status: 1"), follows) == ("NCCL", True, False)
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in text


def test_a_line_without_an_end_takes_no_time():
    assert _said("x" * 16_384) is None


@pytest.mark.parametrize("status", [ExitStatus(143, None), ExitStatus(255, None), ExitStatus(None, signal.SIGTERM)])
def test_who_was_ended_by_others_is_not_read(status, tmp_path):
    assert first_error(tmp_path / "none", evolve(status, last_words=ONE), 5.0) is None


def test_what_is_no_error_is_not_read(tmp_path):
    benign = "2026-11-24 17:00:00.1: I external/x/cuda_driver.cc:1] failed to allocate: CUDA_ERROR_OUT_OF_MEMORY\n"
    assert first_error(tmp_path / "none", ExitStatus(None, signal.SIGSEGV, last_words=benign), 5.0) is None


def test_nothing_is_made_of_what_is_printed_by_one_that_ends_by_itself(tmp_path):
    assert first_error(tmp_path / "none", ExitStatus(3, None, last_words=ONE), 5.0) is None
    assert first_error(tmp_path / "none", ExitStatus(None, signal.SIGKILL, last_words="epoch 3\n"), 5.0) is None


def test_what_the_worker_wrote_itself_comes_first(tmp_path):
    try:
        raise ValueError("bad batch")
    except ValueError as error:
        told = firsterror.describe(error, 3, 1, 7)
    (tmp_path / "error").write_text(json.dumps(told))
    found = first_error(tmp_path / "error", ExitStatus(134, None, last_words=ONE), 5.0)
    assert found is not None
    assert (found.error_type, found.message, found.rank, found.step) == ("ValueError", "bad batch", 3, 7)
    assert 'raise ValueError("bad batch")' in found.traceback


def test_whose_end_it_is_goes_with_what_a_library_said(tmp_path):
    (tmp_path / "error").write_text(json.dumps(firsterror.silence(3, 1)))
    found = first_error(tmp_path / "error", ExitStatus(134, None, last_words=ONE), 5.0)
    assert found is not None and (found.error_type, found.rank) == ("CUDA", 3)
    silent = first_error(tmp_path / "error", ExitStatus(None, signal.SIGKILL), 5.0)
    assert silent is not None and (silent.error_type, silent.rank) == ("", 3)


@pytest.mark.parametrize("text", ["", "[]", '{"type": "ValueError"}', "no json"])
def test_what_can_not_be_read_is_nothing(text, tmp_path):
    (tmp_path / "error").write_text(text)
    assert first_error(tmp_path / "error", ABORTED, 5.0) is None


def test_what_is_no_text_in_an_error_s_message_harms_nobody(tmp_path):
    said = firsterror.describe(ValueError(f"no image: {os.fsdecode(b'caf' + bytes([233]))}\u2028é"), 1, 2, 3)
    firsterror.write(str(tmp_path / "error.json"), said)
    found = first_error(tmp_path / "error.json", ABORTED, 5.0)
    assert found is not None
    assert found.message == "no image: caf?\u2028é"
    exited = WorkerExited("algo-1/2", 5.0, exit_code=1, error=found)
    assert decode_event(json.loads(encode_event(exited))) == exited
