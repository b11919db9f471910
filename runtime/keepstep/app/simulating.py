"""`keepstep simulate`: seeds in, violations and figures out."""

from __future__ import annotations

from collections import Counter

from keepstep.core.events import Event
from keepstep.core.reasons import Reason
from keepstep.core.state import Decision
from keepstep.errors import ConfigError
from keepstep.intake.policy import load_policy
from keepstep.simulation.host import SimHost
from keepstep.simulation.run import run_seed

_QUIET = (Reason.NOTHING_TO_DO, Reason.STALE_REVISION)


def simulate(source: str, seeds: str, trace: bool) -> int:
    """Play the seeds `FROM:TO` under a policy; 1 where one of them broke a rule.

    Raises:
        ConfigError: the policy or the range can not be used.
    """
    policy = load_policy(source, ())
    first, _, last = seeds.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise ConfigError(repr(seeds), "a range as 0:100", key="--seeds")
    fired: Counter[str] = Counter()
    turns, bad = 0, 0
    for seed in range(int(first), int(last)):
        outcome = run_seed(seed, policy, _print_turn if trace else None)
        fired += outcome.fired
        turns += outcome.turns
        if outcome.violations:
            bad += 1
            print(f"seed {seed}: {outcome.violations[0]}")
            print(f"  replay: keepstep simulate {source} --seeds {seed}:{seed + 1} --trace")
    print(f"{int(last) - int(first)} seeds, {bad} bad, {turns} turns")
    print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(fired.items())))
    return 1 if bad else 0


def _print_turn(host: SimHost, event: Event, decision: Decision) -> None:
    notes = [note for note in decision.notes if note.reason not in _QUIET]
    if notes or decision.actions:
        why = "; ".join(f"{note.reason.value} {note.detail}".strip() for note in notes)
        what = ", ".join(type(action).__name__ for action in decision.actions)
        print(f"{host.world.clock.now - 1_000_000:10.3f} {host.name} {event.kind} -> {why} => {what}")
