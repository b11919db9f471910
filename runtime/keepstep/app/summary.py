"""What a run of `keepstep local` came to, computed from its journals: each is folded again, so the figures are proven
ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.app.accounting import FILE
from keepstep.app.replay import journals_under, replay
from keepstep.core.actions import Measure, Report
from keepstep.core.events import FirstStepCompleted, StepsSampled
from keepstep.core.records import GenerationRecord, Phase

_VALUE = re.compile(r"\b([A-Za-z_]\w*)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)$")


@dataclass
class Recovery:
    """One recovery as one host saw it: seconds by phase, and when its first step was completed (unix seconds)."""

    host: str
    ended_at: float
    phases: dict[str, float]


@dataclass
class Run:
    """Everything that the journals of a run tell.

    `intervals` has, by generation, the most steps between two snapshots while it trained.
    """

    steps: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    generations: dict[int, GenerationRecord] = field(default_factory=dict)
    intervals: dict[int, int] = field(default_factory=dict)
    last: GenerationRecord | None = None

    @property
    def snapshot_every(self) -> int:
        """That of the world whose steps had to be done again, the worst of several; of the last one where none had."""
        worst = max(self.generations.values(), key=lambda record: record.lost_steps, default=None)
        if worst is not None and worst.lost_steps:
            lost = max((number for number in self.intervals if number < worst.number), default=0)
            return self.intervals.get(lost, 0)
        return self.last.snapshot_every if self.last is not None else 0


def read_run(folder: Path) -> Run:
    """Fold every journal below `folder`.

    Raises:
        JournalError, ReplayDiffers: as `replay`.
    """
    run = Run()
    for path in journals_under(folder):
        for turn in replay(path):
            state = turn.decision.state
            if isinstance(turn.event, StepsSampled):
                run.steps = max(run.steps, turn.event.completed)
            phases = {
                action.label: action.value
                for action in turn.decision.actions
                if isinstance(action, Report) and action.measure is Measure.RECOVERY
            }
            if phases and isinstance(turn.event, FirstStepCompleted):
                run.recoveries.append(Recovery(state.job.host, turn.event.at, phases))
            seen = state.last_generation
            if seen is not None:
                run.generations[seen.number] = seen
                if seen.phase is Phase.READY:
                    run.intervals[seen.number] = max(seen.snapshot_every, run.intervals.get(seen.number, 0))
                if run.last is None or seen.number >= run.last.number:
                    run.last = seen
    return run


def summarize(folder: Path, faults: Sequence[tuple[str, float]], exit_codes: dict[str, int]) -> dict[str, Any]:
    """The summary of a run.

    Args:
        folder: where the hosts' files are.
        faults: what was done to the run and when, unix seconds.
        exit_codes: of each host.

    Returns:
        JSON-able: steps, restarts, lost_steps, durable_step, recoveries with their phases in seconds (`recovery_s` is
        the longest one's; `detect` counted from the fault where it was inflicted by this run), exit codes.
    """
    run = read_run(folder)
    recoveries = _by_fault(run.recoveries, faults)
    worst = max(recoveries, key=lambda phases: phases["total"], default=None)
    return {
        "steps": run.steps,
        "generations": len(run.generations),
        "restarts": run.last.restarts if run.last is not None else 0,
        "lost_steps": sum(record.lost_steps for record in run.generations.values()),
        "snapshot_every": run.snapshot_every,
        "durable_step": run.last.durable_step if run.last is not None else 0,
        "faults": [{"fault": name, "at": round(at, 3)} for name, at in faults],
        "recovery_s": worst,
        "recoveries": recoveries,
        "exit_codes": exit_codes,
        "verdict": run.last.verdict if run.last is not None else "",
    }


def _by_fault(recoveries: Sequence[Recovery], faults: Sequence[tuple[str, float]]) -> list[dict[str, float]]:
    """One recovery per world that was recovered, as its slowest host saw it, counted from the fault where that is
    known.
    """
    worlds: list[list[Recovery]] = []
    for recovery in sorted(recoveries, key=lambda r: r.ended_at):
        if (
            worlds
            and recovery.ended_at - worlds[-1][-1].ended_at < 0.5
            and recovery.host not in {r.host for r in worlds[-1]}
        ):
            worlds[-1].append(recovery)
        else:
            worlds.append([recovery])
    found = []
    for world in worlds:
        slowest = max(world, key=lambda r: r.phases["total"])
        phases = dict(slowest.phases)
        begun = slowest.ended_at - phases["total"]
        inflicted = [at for _, at in faults if at <= begun + 0.001 and begun - at < 60.0]
        if inflicted:
            hidden = begun - max(inflicted)
            phases["detect"] += hidden
            phases["total"] += hidden
        found.append({name: round(value, 4) for name, value in phases.items()})
    return found


def printed_values(log: Path) -> dict[str, float]:
    """The last `name=value` that ended a line of the chief's output, by name."""
    values: dict[str, float] = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _VALUE.search(line.rstrip())
            if match is not None:
                values[match[1]] = float(match[2])
    return values


def read_goodput(hosts: Mapping[str, tuple[Path, float]]) -> dict[str, Any]:
    """Where the hosts' time went.

    Args:
        hosts: the folder of each host's account, and how long its container was seen to run, seconds.

    Returns:
        JSON-able: `s`, the seconds of all hosts by bucket, the largest first; `hosts`, by name what the account of the
        last container comes to (`accounted_s`) and how long that container ran (`wall_s`).
    """
    spent: Counter[str] = Counter()
    found = {}
    for name, (folder, wall_s) in hosts.items():
        try:
            account = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # killed as a machine is
            continue
        spent.update(account["seconds"])
        found[name] = {"accounted_s": round(account["this_attempt_s"], 3), "wall_s": round(wall_s, 3)}
    return {"s": {name: round(value, 3) for name, value in spent.most_common() if value}, "hosts": found}
