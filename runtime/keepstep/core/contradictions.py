"""Knobs of a policy that can not both be meant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from keepstep.core.causes import FailureCause
from keepstep.core.quantities import show_seconds, show_steps

if TYPE_CHECKING:
    from keepstep.core.policy import Checkpoint, Coordination, FailureRule, Hosts, Interruption, Policy, Telemetry


class Contradiction(ValueError):
    """Two knobs that can not both be meant.

    Attributes:
        key: the knob to change, with the names of its sections.
        found: its value and the one that it clashes with.
        wanted: what would do.
    """

    def __init__(self, key: str, found: str, wanted: str) -> None:
        super().__init__(f"{key}: {found}; wanted {wanted}")
        self.key, self.found, self.wanted = key, found, wanted


def check(policy: Policy) -> None:
    """See that all of a policy can be meant.

    Raises:
        Contradiction: it can not.
    """
    _check_times(policy)
    _check_sources(policy.interruption)
    _check_hosts(policy.elastic.hosts, policy.elastic.spares)
    _check_cadences(policy.checkpoint)
    _check_rules(policy.failures)
    _check_ports(policy.coordination, policy.telemetry)


def _check_times(policy: Policy) -> None:
    """No time may be longer than the one that it has to fit into."""
    backoff, interruption, lease = policy.restart.backoff, policy.interruption, policy.coordination.lease
    pairs = (
        ("restart.backoff.first", backoff.first, "restart.backoff.max", backoff.max),
        ("coordination.lease", lease, "interruption.grace", interruption.grace),
        ("interruption.script_grace", interruption.script_grace, "interruption.grace", interruption.grace),
        ("coordination.lease", lease, "elastic.wait_for_return", policy.elastic.wait_for_return),
        ("interruption.grace", interruption.grace, "interruption.max_runtime", interruption.max_runtime or math.inf),
    )
    for key, value, limit_key, limit in pairs:
        if value > limit:
            raise Contradiction(key, f"found {show_seconds(value)}", f"no more than {limit_key}, {show_seconds(limit)}")


def _check_sources(interruption: Interruption) -> None:
    """The signal can not be left out: whoever sends it kills soon after."""
    if "sigterm" not in interruption.on or len(set(interruption.on)) != len(interruption.on):
        raise Contradiction("interruption.on", f"found {', '.join(interruption.on)}", "sigterm, and others once each")


def _check_hosts(hosts: Hosts, spares: int) -> None:
    if spares and hosts.max != "all":
        raise Contradiction("elastic.spares", f"found {spares}, and elastic.hosts.max", "one of the two")
    if hosts.max != "all" and (hosts.min == "all" or hosts.min > hosts.max):
        raise Contradiction("elastic.hosts.min", f"found {hosts.min}", f"no more than elastic.hosts.max, {hosts.max}")


def _check_cadences(checkpoint: Checkpoint) -> None:
    """A checkpoint is made of a snapshot, and one that is to stay must be made."""
    every = checkpoint.every.steps
    if every is None:
        return
    limit = f"checkpoint.every, {show_steps(every)}"
    if (checkpoint.snapshot_every or 1) > every:
        found = f"found {show_steps(checkpoint.snapshot_every or 1)}"
        raise Contradiction("checkpoint.snapshot_every", found, f"no more than {limit}")
    if checkpoint.keep.every is not None and checkpoint.keep.every < every:
        found = f"found {show_steps(checkpoint.keep.every)}"
        raise Contradiction("checkpoint.keep.every", found, f"no less than {limit}")


def _check_ports(coordination: Coordination, telemetry: Telemetry) -> None:
    taken = (coordination.port, coordination.port + 1)
    if coordination.endpoints == "embedded" and int(telemetry.listen.rpartition(":")[2]) in taken:
        raise Contradiction("telemetry.listen", f"found {telemetry.listen}", f"a port other than etcd's {taken}")


def _check_rules(rules: tuple[FailureRule, ...]) -> None:
    for place, rule in enumerate(rules):
        if rule.exit_code is not None and rule.cause not in ("any", FailureCause.USER_CODE, FailureCause.PEER):
            found = f"found {rule.exit_code} with {rule.cause}"
            raise Contradiction(f"failures.{place}.exit_code", found, "cause user_code")
        if rule.budget is not None and rule.respond != "restart":
            raise Contradiction(f"failures.{place}.budget", f"found it with {rule.respond}", "respond: restart")
        earlier = next((number for number in range(place) if rules[number].covers(rule)), None)
        if earlier is not None:
            found = f"found rule {place + 1} for what rule {earlier + 1} has taken already"
            raise Contradiction(f"failures.{place}", found, "the narrower rule first")
