"""`keepstep simulate --health`: whom a policy finds among many hosts, whom it accuses, and what its response saves."""

from __future__ import annotations

import argparse
import json
from typing import Any

from keepstep.adapters.clock import monotonic
from keepstep.core.stragglers import window_s
from keepstep.errors import ConfigError
from keepstep.intake.policy import load_policy
from keepstep.simulation.ailments import SYNC_S, WORK_S, plan
from keepstep.simulation.health import ASSUMPTIONS, figures, simulate_health
from keepstep.simulation.ledger import lost_h

_HOSTS_MAX, _HOURS_MAX = 5000, 100.0
RESPONDS = ("rebalance", "replace")


def add_options(command: argparse.ArgumentParser) -> None:
    """What `simulate` takes for the health of hosts."""
    command.add_argument("--health", action="store_true", help="stragglers and GPU faults among many hosts instead")
    command.add_argument("--hosts", type=int, default=1000, help="with --health: so many (1000)")
    command.add_argument("--hours", type=float, default=6.0, help="with --health: so long, in virtual time (6)")
    command.add_argument("--seed", type=int, default=1, help="with --health (1)")
    command.add_argument("--price", type=float, default=0.0, help="with --health: what an hour of a host costs")
    command.add_argument("--json", action="store_true", help="with --health: one JSON object")


def simulate_hosts(source: str, hosts: int, hours: float, seed: int, price: float = 0.0) -> dict[str, Any]:
    """Play one seed under a policy as it is, and once more with stragglers replaced where it does not respond.

    Returns:
        Plain JSON: `runs` has a dict of figures by what was set; `saved_host_hours` what the response saved.

    Raises:
        ConfigError: the policy or a number can not be used.
    """
    for key, given, low, high in (("--hosts", hosts, 20, _HOSTS_MAX), ("--hours", hours, 0.1, _HOURS_MAX)):
        if not low <= given <= high:
            raise ConfigError(repr(given), f"{low} to {high}", key=key)
    names = tuple(f"algo-{n}" for n in range(1, hosts + 1))
    ailments = plan(seed, names, hours)
    as_is = load_policy(source)
    variants: dict[str, tuple[str, ...]] = {"as it is": ()}
    if as_is.straggler.respond not in RESPONDS:
        sets: tuple[str, ...] = ("straggler.respond=replace", f"elastic.spares={max(1, hosts // 100)}")
        variants[" ".join(sets)] = sets
    runs: dict[str, Any] = {}
    for name, overrides in variants.items():
        policy = load_policy(source, overrides)
        ledger, cases = simulate_health(policy, names, ailments, hours, monotonic)
        wide_s = max(window_s(hosts), policy.straggler.window * (WORK_S + SYNC_S))
        runs[name] = figures(ledger, cases, policy.straggler.slower_than, wide_s)
        runs[name]["lost_host_hours"] = round(lost_h(runs[name]), 1)
    found: dict[str, Any] = {
        "simulation": True, "policy": source, "hosts": hosts, "hours": hours, "seed": seed,
        "host_hours_paid": round(hosts * hours, 1), "work_s": WORK_S, "assumptions": ASSUMPTIONS, "runs": runs,
    }  # fmt: skip
    if len(runs) > 1:
        before, after = (run["lost_host_hours"] for run in runs.values())
        found["saved_host_hours"] = round(before - after, 1)
        found["saved_money"] = round((before - after) * price, 2) if price else None
    return found


def health(options: argparse.Namespace) -> int:
    """Print what comes out; 1 where a rule was broken."""
    found = simulate_hosts(options.policy, options.hosts, options.hours, options.seed, options.price)
    print(json.dumps(found, indent=2) if options.json else text_of(found))
    return 1 if any(run["violations"] for run in found["runs"].values()) else 0


def text_of(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"A simulation, no measurement: {found['hosts']} hosts for {found['hours']:g} h in virtual time, "
        f"seed {found['seed']}, policy {found['policy']}."
    ]
    lines += ["Assumed:", *(f"  - {each}" for each in found["assumptions"])]
    for name, run in found["runs"].items():
        lines += ["", f"{found['policy']}, {name}", *(f"  {key:28}{value}" for key, value in _rows(run))]
    if "saved_host_hours" in found:
        money = f", {found['saved_money']} in money" if found["saved_money"] is not None else ""
        lines += [
            "",
            f"The response saves {found['saved_host_hours']} of {found['host_hours_paid']} host-hours{money}.",
        ]
    return "\n".join(lines)


def _rows(run: dict[str, Any]) -> list[tuple[str, str]]:
    slow, gpu, then, hours = run["stragglers"], run["gpu_faults"], run["followed"], run["host_hours"]
    ends = ", ".join(f"{count} with {code}" for code, count in then["jobs_ended"].items()) or "none"
    turns = run["leader"]["turns_that_judge_ms"]
    return [
        ("stragglers above the ratio", f"{slow['above_ratio']}, found {slow['found']}, "
         f"there too shortly to tell {slow['too_short_to_tell']}; missed: {', '.join(slow['missed']) or 'none'}"),
        ("clearly above it", f"{slow['clearly_above']}, found {slow['clearly_above_found']}"),
        ("found after", f"{_spread(slow['after_s'], 's')}; {_spread(slow['after_steps'], 'steps')}"),
        ("below the ratio", f"{slow['below_ratio']}, told {len(slow['below_ratio_told'])}"),
        ("false alarms", f"{run['false_alarms']}: {run['false_alarms_per_1000_host_hours']} per 1,000 host-hours; and "
         f"{run['spells_of_a_minute_told']} of hosts that were slow for a minute"),
        ("GPU faults", f"{gpu['there']}, found {gpu['found']} after {_spread(gpu['after_s'], 's')}; "
         f"false {gpu['false']}"),
        ("what followed", f"stragglers cordoned {then['stragglers_cordoned']}, GPU faults {then['faults_cordoned']}; "
         f"others cordoned {then['others_cordoned']}; jobs ended: {ends}"),
        ("host-hours lost", f"{run['lost_host_hours']}: to stragglers {hours['lost_to_stragglers']}, "
         f"stopped {hours['stopped']}, repair {hours['repair']}, spares {hours['spares']}; (noise "
         f"{hours['lost_to_noise']})"),
        ("a turn that judges, ms", ", ".join(f"{name} {turns[name]}" for name in turns)),
        *[("BROKEN", text) for text in run["violations"]],
    ]  # fmt: skip


def _spread(values: dict[str, float], unit: str) -> str:
    return f"{values['median']:g} {unit}, {values['max']:g} at the most" if values else "-"
