"""What a host finds out about itself: rates, disks, GPUs. Doctor and preflight call the same functions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.app import measuring
from keepstep.app.measuring import copy_rate, hash_rate, look_at_disk, look_at_gpus
from keepstep.ports import GpuSample


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WINDOW_S", "_COPY_S"):
        monkeypatch.setattr(measuring, name, 0.001)


def test_rates_are_of_this_machine(hurried):
    assert hash_rate(1) > 1e6
    assert hash_rate(2) > 1e6
    assert copy_rate() > 1e6


def test_a_disk_that_can_be_written_is_left_as_it_was(tmp_path):
    finding = look_at_disk("model", tmp_path / "not" / "there" / "yet")
    assert finding.level in ("ok", "warn") and str(tmp_path) in finding.found
    assert list(tmp_path.iterdir()) == []


def test_a_disk_whose_files_need_names_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # EISDIR, as of a kernel or file system without it
    assert look_at_disk("model", tmp_path).level in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_can_not_be_written_says_why():
    finding = look_at_disk("model", Path("/proc/self/fd"))
    assert (finding.check, finding.level) == ("disk", "bad")
    assert finding.found.startswith("model: /proc/self/fd can not be written: ") and finding.fix


@pytest.mark.parametrize(
    ("lost", "promised", "says"),
    [
        ((), 2, []),
        ((1,), 2, ["lost by the driver: GPU-1"]),
        ((), 3, ["3 were given, the driver sees 2"]),
        ((0, 1), 8, ["lost by the driver: GPU-0, GPU-1", "8 were given, the driver sees 2"]),
    ],
)
def test_gpus_are_held_against_what_was_given(lost, promised, says):
    samples = [GpuSample(f"GPU-{number}", number, lost=number in lost) for number in range(2)]
    assert [finding.found for finding in look_at_gpus(samples, promised)] == says
