"""Which verdict a GPU's facts come to, and what is forgiven."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core import gpus
from keepstep.core.causes import FailureCause
from keepstep.core.events import CordonsRead, GpusSampled
from keepstep.core.gpu_events import GpuSample, KeptCordon
from keepstep.core.records import CordonRecord, Phase
from keepstep.core.state import Turn
from keepstep.core.view import Seen
from keepstep.intake.policy import load_policy
from tests.unit.core.values import a_failure, a_generation, a_turn

WELL = GpuSample("GPU-a", 0, temperature_c=60.0, ecc_corrected=5, ecc_uncorrected=1, pcie_replays=9, links_down=2)


def told(*samples: GpuSample, knobs: tuple[str, ...] = (), **job: object) -> Turn:
    """A turn in which all these were told, one after the other."""
    turn = a_turn(load_policy("default", knobs), **job)
    for sample in samples:
        gpus.on_gpus_sampled(turn, GpusSampled((sample,)))
    return turn


def faults(turn: Turn) -> list[str]:
    return [fault.text for fault in turn.state.gpus.faults]


def strains(turn: Turn) -> tuple[str, ...]:
    gpus.judge(turn)
    return turn.state.strains.get("gpu", ())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"xids": (79,)}, "Xid 79, it has fallen off the bus"),
        ({"xids": (13, 64, 31)}, "Xid 64, a memory row could not be remapped, or a page not retired"),
        ({"ecc_uncorrected": 3}, "2 memory errors that could not be corrected"),
        ({"remap_failed": True}, "a memory row could not be remapped"),
        ({"lost": True, "ecc_uncorrected": None, "temperature_c": None}, "the driver has lost it"),
        ({"recovery": "drain_and_reset"}, "the driver wants it repaired: drain and reset"),
    ],
)
def test_a_fault(changes, says):
    assert faults(told(WELL, replace(WELL, **changes))) == [says]


@pytest.mark.parametrize(
    "changes",
    [
        {"xids": (13, 31, 43, 45)},
        {"ecc_uncorrected": 0},
        {"ecc_uncorrected": None},
        {"temperature_c": 92.0},
        {"throttle": ("sw_power_cap",)},
        {"remap_failed": False},
        {"ecc_corrected": 0, "pcie_replays": 0},
        {"links_down": 1},
    ],
)
def test_what_is_neither_a_fault_nor_a_strain(changes):
    turn = told(WELL, replace(WELL, **changes))
    assert (faults(turn), strains(turn)) == ([], ())


def test_what_a_gpu_had_counted_before_is_no_news():
    assert faults(told(replace(WELL, ecc_uncorrected=7))) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"throttle": ("hw_slowdown", "hw_power_brake")}, "clocks held down by hw slowdown, hw power brake"),
        ({"throttle": ("hw_slowdown",), "clock_mhz": 300, "clock_max_mhz": 1980},
         "clocks held down by hw slowdown, 300 of 1980 MHz"),
        ({"temperature_c": 93.5}, "93.5 degrees Celsius"),
        ({"links_down": 4}, "NVLinks down: 2"),
        ({"ecc_corrected": 9}, "corrected memory errors grow, 4 so far"),
        ({"pcie_replays": 10}, "PCIe replays grow, 1 so far"),
        ({"foreign_bytes": 2_000_000_000}, "2.0 GB of its memory held by processes of others"),
        ({"repair_pending": True}, "a repair of its memory waits for a reset"),
    ],
)  # fmt: skip
def test_a_strain(changes, says):
    turn = told(WELL, replace(WELL, **changes))
    assert (faults(turn), strains(turn)) == ([], (f"GPU-a: {says}",))


def test_hot_is_a_fault_the_third_time_in_a_row():
    hot, cool = replace(WELL, temperature_c=95.0), WELL
    assert faults(told(hot, hot, cool, hot, hot)) == []
    assert faults(told(hot, cool, hot, hot, hot)) == ["95 degrees Celsius, and more than 92 on 3 readings in a row"]
    assert faults(told(hot, hot, hot, knobs=("health.gpu.temperature_max=95",))) == []


def test_which_xids_are_fatal_the_policy_says():
    assert faults(told(replace(WELL, xids=(79,)), knobs=("health.gpu.fatal_xids=[]",))) == []
    assert faults(told(replace(WELL, xids=(31,)), knobs=("health.gpu.fatal_xids=[31]",))) == ["Xid 31"]


def test_a_fault_is_told_once_and_stays():
    lost = replace(WELL, lost=True)
    turn = told(lost, lost, WELL)
    assert faults(turn) == ["the driver has lost it"]
    assert [note.reason for note in turn.notes] == ["gpu_fault"]


def test_what_is_forgiven_is_a_fault_again_once_it_was_over():
    broken = replace(WELL, remap_failed=True, xids=(79,))
    turn = told(WELL, broken)
    gpus.on_uncordoned(turn, "algo-2")
    assert len(faults(turn)) == 2
    gpus.on_uncordoned(turn, "algo-1")
    assert faults(turn) == []
    for sample, wanted in (
        (replace(broken, xids=()), []),
        (replace(broken, xids=(79,)), ["Xid 79, it has fallen off the bus"]),
        (WELL, ["Xid 79, it has fallen off the bus"]),
        (replace(broken, xids=()), ["Xid 79, it has fallen off the bus", "a memory row could not be remapped"]),
    ):
        gpus.on_gpus_sampled(turn, GpusSampled((sample,)))
        assert faults(turn) == wanted


def takes_part(turn: Turn) -> Turn:
    """Have it be a member of a world that trains."""
    generation = a_generation(phase=Phase.READY)
    turn.set_cluster(generation=Seen(generation, 1), members={m.host: m.node_id for m in generation.members})
    return turn


def test_a_fault_of_a_host_whose_worker_has_died_of_it_is_what_came_first():
    turn = takes_part(told(replace(WELL, xids=(79,))))
    died = a_failure(turn.now - 2.0, FailureCause.KILLED)
    turn.set(failure=died, failure_generation=3)
    gpus.judge(turn)
    failure = turn.state.failure
    assert failure is not None
    assert (failure.cause, failure.at, failure.rank) == (FailureCause.GPU_FAULT, died.at, 0)
    assert failure.message == "GPU-a: Xid 79, it has fallen off the bus"


def test_a_worker_that_is_done_needs_its_gpu_no_more():
    turn = takes_part(told(replace(WELL, xids=(79,))))
    turn.set(done=3)
    gpus.judge(turn)
    assert turn.state.failure is None


@pytest.mark.parametrize(("what", "known"), [("GPU-a", True), ("boot-1", True), ("GPU-b", False)])
def test_the_list_knows_a_host_by_its_gpus_and_its_machine(what, known):
    turn = told(WELL, machine="boot-1")
    turn.set(lease=None)
    gpus.on_cordons_read(turn, CordonsRead((KeptCordon(what, "algo-9", "ada", "slow fan", 1.0),)))
    assert (f"{what} is cordoned by ada: slow fan" == gpus._why(turn.state)) == known


@pytest.mark.parametrize(
    ("minimum", "cordoned", "missing"),
    [
        ("all", {"algo-1": "health"}, ["algo-1"]),
        ("all", {"algo-1": "ada"}, []),
        ("1", {"algo-1": "health"}, []),
        ("1", {"algo-1": "health", "algo-2": "ada"}, ["algo-1"]),
        ("all", {}, []),
    ],
)
def test_whether_the_job_can_do_without(minimum, cordoned, missing):
    turn = a_turn(load_policy("default", (f"elastic.hosts.min={minimum}",)))
    turn.set_cluster(cordons={host: Seen(CordonRecord(host, by, 5.0, "why"), 1) for host, by in cordoned.items()})
    assert [cordon.host for cordon in gpus.missed(turn)] == missing
