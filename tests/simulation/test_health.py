"""A sample of `make campaign-health`: 60 hosts, a few of them sick, and what the figures are worth."""

from __future__ import annotations

from itertools import count

import pytest

from keepstep.core import gpus, slowness, stragglers
from keepstep.core.policy import Policy
from keepstep.core.splits import Part
from keepstep.intake.policy import load_policy
from keepstep.simulation.ailments import COMPUTE_S, WORK_S, Ailment, Kind, plan
from keepstep.simulation.health import figures, simulate_health

NAMES = tuple(f"algo-{n}" for n in range(1, 61))
RESPONDS = ("straggler.respond=replace", "elastic.spares=3")


def slow(host: int, at_s: float, ratio: float, part: Part = Part.COMPUTE, kind: Kind = Kind.STRAGGLER) -> Ailment:
    return Ailment(kind, f"algo-{host}", at_s, part=part, more_s=(ratio - 1.0) * WORK_S)


SICK = [
    slow(5, 60.0, 1.2),
    slow(7, 90.0, 1.5),
    slow(11, 120.0, 1.6, Part.DATA),
    slow(13, 150.0, 2.5, kind=Kind.THROTTLED),
    Ailment(Kind.NEIGHBOUR, "algo-20", 70.0, 8.0, more_s=1.2 * COMPUTE_S),
    Ailment(Kind.STALL, "algo-21", 80.0, 0.0, Part.DATA, 30.0),
    Ailment(Kind.HARMLESS_XID, "algo-22", 100.0, 0.0, xid=31),
]


def play(policy: Policy, ailments: list[Ailment], hours: float = 0.12) -> dict:
    ticks = count()
    ledger, cases = simulate_health(policy, NAMES, ailments, hours, lambda: float(next(ticks)))
    return figures(ledger, cases, policy.straggler.slower_than, 8.4) | {"cases": cases}


def wrong_of(found: dict) -> list[str]:
    """What of this must not be, whatever is drawn."""
    slow_ones, faults = found["stragglers"], found["gpu_faults"]
    wrong = [f"violation: {text}" for text in found["violations"]]
    wrong += [f"false alarm: {text}" for text in found["false_alarms_told"]]
    wrong += [f"missed: {text}" for text in slow_ones["missed"]]
    wrong += [f"below the ratio, and told: {text}" for text in slow_ones["below_ratio_told"]]
    if faults["false"] or faults["found"] != faults["there"]:
        wrong.append(f"faults of GPUs: {faults}")
    return wrong


@pytest.mark.parametrize("preset", ["default", "spot"])
def test_who_is_clearly_slow_is_found_and_nobody_else(preset):
    found = play(load_policy(preset), SICK)
    assert wrong_of(found) == []
    assert (found["stragglers"]["above_ratio"], found["stragglers"]["found"]) == (3, 3)
    assert found["stragglers"]["below_ratio"] == 1
    assert found["followed"]["slow_for_once"] >= 2
    assert (found["followed"]["stragglers_cordoned"], found["followed"]["jobs_ended"]) == (0, {})


def test_stragglers_are_replaced_by_spares_and_cost_less_so():
    observed, replaced = play(Policy(), SICK, 0.25), play(load_policy("default", RESPONDS), SICK, 0.25)
    assert wrong_of(replaced) == []
    assert replaced["followed"]["stragglers_cordoned"] == 3
    before, after = (each["host_hours"]["lost_to_stragglers"] for each in (observed, replaced))
    assert after < before / 2
    assert replaced["lost_steps"] == 0


@pytest.mark.parametrize("ends_worker", [False, True])
@pytest.mark.parametrize("kind", [Kind.FATAL_XID, Kind.ECC])
def test_a_fault_of_a_gpu_ends_the_job_for_repair_and_the_next_run_goes_on(kind, ends_worker):
    fault = Ailment(kind, "algo-9", 200.0, xid=79 if kind is Kind.FATAL_XID else 0, ends_worker=ends_worker)
    found = play(Policy(), [fault], 0.3)
    assert wrong_of(found) == []
    assert (found["followed"]["jobs_ended"], found["followed"]["runs"]) == ({"76": 1}, 2)
    assert found["lost_steps"] == 0 and found["gpu_faults"]["there"] == 1


def test_a_spell_of_a_minute_costs_a_host_where_stragglers_are_replaced():
    spell = Ailment(Kind.SPELL, "algo-30", 90.0, 60.0, more_s=1.0 * COMPUTE_S)
    found = play(load_policy("default", RESPONDS), [spell])
    assert (found["false_alarms"], found["spells_of_a_minute_told"]) == (0, 1)
    assert found["followed"]["others_cordoned"] == 1


def test_a_seed_draws_the_same_ailments_and_spares_the_first_host():
    names = tuple(f"algo-{n}" for n in range(1, 501))
    drawn = plan(3, names, 100.0)
    assert drawn == plan(3, names, 100.0) != plan(4, names, 100.0)
    assert {each.kind for each in drawn} == set(Kind)
    assert all(each.host != "algo-1" and 0 <= each.at_s < 360_000 for each in drawn)


# --- bugs planted on purpose: a sample that finds none of them would be worth nothing --------------------------------


def test_a_ratio_that_nobody_minds_is_caught(monkeypatch):
    monkeypatch.setattr(slowness, "_costs", lambda own, usual_s, slower_than: own.work_s > 1.1 * usual_s)
    assert any("below the ratio, and told" in text for text in wrong_of(play(Policy(), SICK)))


def test_alarms_at_whatever_scatters_are_caught(monkeypatch):
    monkeypatch.setattr(slowness.Crowd, "is_slow", lambda self, host, bound: self._splits[host].work_s > 1.01 * WORK_S)
    assert any("false alarm" in text for text in wrong_of(play(Policy(), SICK)))


def test_a_leader_that_never_judges_is_caught(monkeypatch):
    monkeypatch.setattr(stragglers, "window_s", lambda members: 1e9)
    assert any("missed" in text for text in wrong_of(play(Policy(), SICK)))


def test_a_harmless_xid_that_counts_as_a_fault_is_caught(monkeypatch):
    monkeypatch.setattr(gpus, "_sudden", lambda before, sample, knobs: {f"{sample.uuid} x": "x"} if sample.xids else {})
    assert any("faults of GPUs" in text for text in wrong_of(play(Policy(), SICK)))
