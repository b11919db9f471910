"""What became of a simulated job's sick hosts, and what they cost: cases, and where the host-hours went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from keepstep.core.gpu_events import KeptCordon
from keepstep.simulation.ailments import CHRONIC, FAULTS, Ailment, Kind

HOUR_S = 3600.0
BORDER = 0.05
"""Within so much of the policy's ratio it is chance whether a straggler is found."""
TELLS_WINDOWS = 6
"""Who was a straggler for fewer windows could hardly be found."""


@dataclass
class Case:
    """One ailment, and what was done about it; times in seconds since the simulation began.

    Attributes:
        began_at: when it first held up a step; `began_step` which one. None where none was.
        worked_s: so long its host trained while it lasted.
        found_at: when it was told; `found_step` after which step.
        gone: it is of no concern any more: over, or its hardware was replaced.
    """

    ailment: Ailment
    began_at: float | None = None
    began_step: int = 0
    worked_s: float = 0.0
    found_at: float | None = None
    found_step: int = 0
    cordoned_at: float | None = None
    gone: bool = False


@dataclass
class Ledger:
    """Host-hours and alarms, over all runs of the job; `listed` are the cordons that its store keeps."""

    hosts: int
    trained_host_s: float = 0.0
    by_stragglers_host_s: float = 0.0
    by_noise_host_s: float = 0.0
    spare_host_s: float = 0.0
    stopped_host_s: float = 0.0
    repair_host_s: float = 0.0
    lost_steps: int = 0
    steps: int = 0
    runs: int = 0
    false_alarms: list[str] = field(default_factory=list)
    spells_told: int = 0
    others_cordoned: int = 0
    false_faults: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    listed: dict[str, KeptCordon] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    judging_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    statuses_max: int = 0


def figures(ledger: Ledger, cases: Sequence[Case], ratio: float, window_s: float) -> dict[str, Any]:
    """What the simulation comes to, as plain JSON; times in seconds, costs in host-hours."""
    chronic = [case for case in cases if case.ailment.kind in CHRONIC and case.began_at is not None]
    above = [case for case in chronic if case.ailment.ratio >= ratio]
    told_in_time = [case for case in above if case.worked_s >= TELLS_WINDOWS * window_s]
    clear = [case for case in told_in_time if case.ailment.ratio >= ratio * (1 + BORDER)]
    found = [case for case in above if case.found_at is not None]
    below = [case for case in chronic if case.ailment.ratio < ratio]
    wrong = [case for case in below if case.found_at is not None]
    faults = [case for case in cases if case.ailment.kind in FAULTS and case.ailment.at_s >= 0 and case.began_at]
    trained_h = ledger.trained_host_s / HOUR_S
    alarms = len(ledger.false_alarms)
    return {
        "host_hours": {
            "trained": round(trained_h, 1),
            "lost_to_stragglers": round(ledger.by_stragglers_host_s / HOUR_S, 1),
            "lost_to_noise": round(ledger.by_noise_host_s / HOUR_S, 1),
            "stopped": round(ledger.stopped_host_s / HOUR_S, 1),
            "repair": round(ledger.repair_host_s / HOUR_S, 1),
            "spares": round(ledger.spare_host_s / HOUR_S, 1),
        },
        "steps": ledger.steps,
        "lost_steps": ledger.lost_steps,
        "stragglers": {
            "above_ratio": len(above),
            "too_short_to_tell": len(above) - len(told_in_time),
            "clearly_above": len(clear),
            "clearly_above_found": sum(case.found_at is not None for case in clear),
            "found": len(found),
            "after_s": _spread([(case.found_at or 0.0) - (case.began_at or 0.0) for case in found]),
            "after_steps": _spread([case.found_step - case.began_step for case in found]),
            "below_ratio": len(below),
            "below_ratio_told": [f"{case.ailment.host} {case.ailment.ratio:.3f}" for case in wrong],
            "missed": [f"{c.ailment.host} {c.ailment.ratio:.3f}" for c in told_in_time if c.found_at is None],
        },
        "false_alarms": alarms,
        "false_alarms_told": ledger.false_alarms[:10],
        "false_alarms_per_1000_host_hours": round(1000.0 * alarms / trained_h, 3) if trained_h else 0.0,
        "spells_of_a_minute_told": ledger.spells_told,
        "gpu_faults": {
            "there": len(faults),
            "found": sum(case.found_at is not None for case in faults),
            "after_s": _spread([c.found_at - c.ailment.at_s for c in faults if c.found_at is not None]),
            "false": len(ledger.false_faults),
        },
        "followed": {
            "stragglers_cordoned": sum(case.cordoned_at is not None for case in chronic),
            "faults_cordoned": sum(case.cordoned_at is not None for case in faults),
            "others_cordoned": ledger.others_cordoned,
            "jobs_ended": dict(ledger.ends),
            "runs": ledger.runs,
            "slow_for_once": ledger.reasons["slow_for_once"],
        },
        "leader": {
            "turns_that_judge_ms": _costs(ledger.judging_s),
            "other_turns_ms": _costs(ledger.other_s),
            "statuses_in_a_turn_max": ledger.statuses_max,
        },
        "violations": ledger.violations,
    }


def lost_h(found: dict[str, Any]) -> float:
    """All host-hours that bought no step: what a response is to make fewer of."""
    hours: dict[str, float] = found["host_hours"]
    return sum(hours[name] for name in ("lost_to_stragglers", "stopped", "spares", "repair"))


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": round(median(values), 1), "max": round(max(values), 1)}


def _costs(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    high = sorted(seconds)[int(0.99 * (len(seconds) - 1))]
    return {
        "count": len(seconds), "mean": round(fmean(seconds) * 1e3, 2), "p99": round(high * 1e3, 2),
        "worst": round(max(seconds) * 1e3, 2),
    }  # fmt: skip


def is_brief(kind: Kind) -> bool:
    """Whether it is over soon."""
    return kind in (Kind.NEIGHBOUR, Kind.SPELL, Kind.STALL)
