"""The probe through NVML's real bindings, against a library whose answers are written here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.adapters.nvml import RECOVERY_ACTIONS, parse_line
from keepstep.ports import GpuSample
from tests.support.scripted_nvml import Script, build

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def environment(library: Path, tmp_path: Path) -> dict[str, str]:
    script = {"LD_LIBRARY_PATH": str(library), "NVML_SCRIPT": str(tmp_path / "script")}
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(RUNTIME), **script}


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "script", "GPU-a", "GPU-b")


def once(environment: dict[str, str], *words: str) -> list[GpuSample]:
    """One poll."""
    command = [sys.executable, "-m", "keepstep.adapters.nvml", "--once", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return parse_line(done.stdout)


class Probe:
    """A probe that runs."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.adapters.nvml", "--every", "0.5"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def polls(self) -> Iterator[list[GpuSample]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield parse_line(line)


@pytest.fixture
def probe(environment: dict[str, str], script: Script) -> Iterator[Probe]:
    probe = Probe(environment)
    yield probe
    probe.process.kill()
    probe.process.communicate(timeout=30)


def test_a_gpu_under_load(environment, script):
    one, other = once(environment)
    assert (one.uuid, one.index, other.uuid, other.index) == ("GPU-a", 0, "GPU-b", 1)
    assert one == GpuSample(
        "GPU-a", 0, temperature_c=55.0, power_w=312.5, memory_used_bytes=5 << 30, ecc_corrected=3, ecc_uncorrected=0,
        remap_failed=False, throttle=("sw_power_cap",), repair_pending=False, clock_mhz=1755, clock_max_mhz=1980,
        links_down=0, link_errors=2, pcie_replays=7, foreign_bytes=0,
    )  # fmt: skip


FACTS: dict[str, tuple[dict[str, object], str, object]] = {
    "uncorrected": ({"ecc_uncorrected": 4}, "ecc_uncorrected", 4),
    "corrected": ({"ecc_corrected": 5_000_000_000}, "ecc_corrected", 5_000_000_000),
    "remap failed": ({"remap_failed": 1}, "remap_failed", True),
    "remap pending": ({"remap_pending": 1}, "repair_pending", True),
    "retirement pending": ({"remap_failed": None, "retirement_pending": 1}, "repair_pending", True),
    "retired": ({"retired_by_single": 2, "retired_by_double": 3}, "retired_pages", 5),
    "throttled": ({"throttle": 0xA0}, "throttle", ("sw_thermal_slowdown", "hw_power_brake")),
    "throttled, old driver": ({"throttle": None, "old_throttle": 0x40}, "throttle", ("hw_thermal_slowdown",)),
    "links down": ({"links_down": 2}, "links_down", 2),
    "link errors": ({"field__45__0": 3, "field__207__0": 99, "field__208__3": 5}, "link_errors", 10),
    "replays": ({"pcie_replays": 12}, "pcie_replays", 12),
    "a reset is required": ({"power__error": 16}, "recovery", "gpu_reset"),
    "nothing known": ({"temperature": None, "temperature__error": 999}, "temperature_c", None),
    "no permission": ({"memory__error": 4}, "memory_used_bytes", None),
    "lost": ({"lost": 1}, "lost", True),
    "lost while it is asked": ({"remap_failed__error": 15}, "lost", True),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_fact(environment, script, name):
    answers, field, wanted = FACTS[name]
    script.answer(0, **answers)
    one, other = once(environment)
    assert getattr(one, field) == wanted
    assert (other.uuid, other.lost, other.temperature_c) == ("GPU-b", False, 55.0)


@pytest.mark.parametrize(("action", "name"), [*RECOVERY_ACTIONS.items(), (0, ""), (12, "action_12")])
def test_what_the_driver_wants_done(environment, script, action, name):
    script.recovery(0, action)
    assert [gpu.recovery for gpu in once(environment)] == [name, ""]


def test_memory_of_others(environment, script):
    """This process is no descendant of the one that is named; the probe's parent's family is."""
    script.answer(0, process__pid=os.getpid(), process__memory=4096)
    script.answer(1, process__pid=2**22 + 1, process__memory=4096)  # nobody that can be seen
    assert [gpu.foreign_bytes for gpu in once(environment)] == [0, 0]
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert [gpu.foreign_bytes for gpu in once(environment, "--family", str(sleeper.pid))] == [4096, 0]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_lost_gpu_that_comes_first_has_no_name(environment, script):
    script.answer(0, lost=1)
    assert once(environment) == [GpuSample("index-0", 0, lost=True), *once(environment)[1:]]


def test_no_gpu_and_no_driver(environment, tmp_path):
    assert once(environment) == []
    (tmp_path / "script").write_text("gpus 0\n")
    assert once(environment) == []


def test_xids_come_at_once_and_once(probe, script):
    polls = probe.polls()
    assert [gpu.xids for gpu in next(polls)] == [(), ()]
    script.xid(1, 63)
    script.xid(1, 79)
    script.xid(0, 13)
    seen: dict[str, tuple[int, ...]] = {"GPU-a": (), "GPU-b": ()}
    for samples in polls:
        seen = {gpu.uuid: (*seen[gpu.uuid], *gpu.xids) for gpu in samples}
        if sum(map(len, seen.values())) == 3:
            break
    assert seen == {"GPU-a": (13,), "GPU-b": (63, 79)}
    assert [gpu.xids for gpu in next(polls)] == [(), ()]


def test_a_gpu_that_falls_off_the_bus_while_it_is_watched_keeps_its_name(probe, script):
    polls = probe.polls()
    next(polls)
    script.answer(1, lost=1)
    script.xid(1, 79)
    told = next(gpu for samples in polls for gpu in samples if gpu.xids)
    assert told == GpuSample("GPU-b", 1, lost=True, xids=(79,))


@pytest.mark.parametrize("what", ["power", "fields", "wait", "remap_failed"])
def test_a_hanging_call_stops_the_words_and_can_be_killed(probe, script, what):
    polls: Callable[[], list[GpuSample]] = probe.polls().__next__
    assert len(polls()) == 2
    script.hang(what)
    probe.process.kill()
    assert probe.process.wait(30) == -9
