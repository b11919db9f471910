"""Seeds under the policy of the simulation's tests, and the one command that plays a seed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from keepstep.core.policy import Policy
from keepstep.intake.policy import load_policy
from keepstep.simulation.faults import FAULTS
from keepstep.simulation.many import run_many
from keepstep.simulation.run import Outcome, World, run_seed

POLICY_FILE = Path(__file__).with_name("patient.yaml")


@cache
def patient() -> Policy:
    return load_policy(POLICY_FILE)


def replay_command(seed: int) -> str:
    return f"keepstep simulate tests/simulation/{POLICY_FILE.name} --seeds {seed}:{seed + 1} --trace"


@dataclass
class Played:
    """What became of a range of seeds; `bad` holds a line of text for each one that broke a rule."""

    bad: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def play(seeds: Iterable[int], policy: Policy | None = None) -> Played:
    played = Played()
    for seed in seeds:
        with told_how_to_replay(seed):
            outcome = run_seed(seed, policy or patient())
        played.fired += outcome.fired
        played.reasons += outcome.reasons
        if outcome.violations:
            played.bad.append(f"{outcome.violations[0]}\n    {replay_command(seed)}")
    return played


def first_violation(seeds: Iterable[int], policy: Policy | None = None) -> str:
    """What the first bad seed broke; empty where all are well. For bugs planted on purpose."""
    for seed in seeds:
        violations = run_seed(seed, policy or patient()).violations
        if violations:
            return violations[0]
    return ""


def first_violation_of(faults: Collection[str], seeds: Iterable[int]) -> str:
    """The same where only these faults happen, for bugs that few others bring to light."""
    chosen = [fault for fault in FAULTS if fault.name in faults]
    assert len(chosen) == len(faults)
    for seed in seeds:
        world = World(seed, patient(), hosts=2, last_step=40)
        world.play(chosen)
        if world.checkers.violations:
            return world.checkers.violations[0]
    return ""


@contextmanager
def told_how_to_replay(seed: int) -> Iterator[None]:
    """A crash of the core says which seed it came from."""
    try:
        yield
    except BaseException as error:
        error.add_note(replay_command(seed))
        raise


def play_many(seed_and_hosts: tuple[int, int]) -> Outcome:
    """One seed of the campaign of many hosts; 0 hosts has the seed draw their number."""
    seed, hosts = seed_and_hosts
    try:
        return run_many(seed, patient(), hosts)
    except BaseException as error:
        error.add_note(f"python -m tests.simulation.campaign --seeds {seed}:{seed + 1}")
        raise
