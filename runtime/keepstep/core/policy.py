"""The policy: one frozen tree. Every knob has a unit, a range, a default and a failure it is for.

A value here is parsed text; where the text came from (file, line, preset) is the business of `intake/policy`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from keepstep.core.causes import FailureCause

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS = re.compile(r"(\d+)\s*steps?")
_BUDGET = re.compile(r"(\d+)\s+per\s+(.+)")

Response = Literal["restart", "stop", "exit"]


def parse_seconds(text: object) -> float:
    """Seconds of "500ms", "5s", "2min", "1h" or "1d".

    Raises:
        ValueError: it is none of these; a bare number does not say its unit.
    """
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("wanted a duration with its unit, as 500ms, 5s, 2min or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_steps(text: object) -> int:
    """Steps of "10 steps".

    Raises:
        ValueError: it is not a positive number of steps.
    """
    match = _STEPS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or int(match[1]) < 1:
        raise ValueError("wanted a number of steps, as 10 steps")
    return int(match[1])


def _show_seconds(seconds: float) -> str:
    for unit in ("h", "min", "s"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds / _SECONDS[unit])}{unit}"
    return "0s" if seconds == 0 else f"{round(seconds * 1000)}ms"


def _seconds(value: object) -> float:
    return parse_seconds(value)


Seconds = Annotated[float, BeforeValidator(_seconds), PlainSerializer(_show_seconds, return_type=str)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class Cadence(_Model):
    """How often: in steps, in seconds, or left to keepstep (both None)."""

    steps: int | None = None
    seconds: float | None = None


def _cadence(value: object) -> object:
    if isinstance(value, Cadence | dict):
        return value
    if value == "auto":
        return Cadence()
    for parse, name in ((parse_steps, "steps"), (parse_seconds, "seconds")):
        try:
            return Cadence(**{name: parse(value)})
        except ValueError:
            continue
    raise ValueError("wanted auto, a number of steps as 500 steps, or a duration as 2min")


def _show_cadence(value: Cadence) -> str:
    if value.steps is not None:
        return f"{value.steps} steps"
    return "auto" if value.seconds is None else _show_seconds(value.seconds)


CadenceField = Annotated[Cadence, BeforeValidator(_cadence), PlainSerializer(_show_cadence, return_type=str)]


class Budget(_Model):
    """So many failures within a window of so many seconds."""

    count: int
    window_s: float


def _budget(value: object) -> object:
    if isinstance(value, Budget | dict):
        return value
    match = _BUDGET.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("wanted a number of restarts per time, as 8 per 1h")
    return Budget(count=int(match[1]), window_s=parse_seconds(match[2]))


BudgetField = Annotated[
    Budget,
    BeforeValidator(_budget),
    PlainSerializer(lambda b: f"{b.count} per {_show_seconds(b.window_s)}", return_type=str),
]


def knob(default: Any, text: str, *, unit: str, failure: str, **limits: Any) -> Any:
    """A field with what `policy explain` shows: its unit and the failure it is for."""
    return Field(default, description=text, json_schema_extra={"unit": unit, "failure": failure}, **limits)


class Launch(_Model):
    """How workers are started."""

    strategy: Literal["auto", "plain", "mirrored", "multi_worker"] = knob(
        "auto", "How the script is distributed.", unit="name", failure="a script started for another world than its own"
    )
    instrument: Literal["auto", "off"] = knob(
        "auto", "Whether Model.fit reports its steps, is snapshotted and resumed.", unit="name",
        failure="an instrumentation that a script does not bear",
    )  # fmt: skip
    python: str = knob(
        "python", "The interpreter of the user's script.", unit="path", min_length=1,
        failure="a script run by an interpreter that lacks its packages",
    )  # fmt: skip


class Backoff(_Model):
    """How long to wait after a failure; doubled with each one in the budget's window."""

    first: Seconds = knob(0.0, "Wait after the first failure.", unit="duration", failure="a crash loop", ge=0, le=3600)
    max: Seconds = knob(60.0, "The longest wait.", unit="duration", failure="a crash loop", ge=0, le=86400)


class Restart(_Model):
    """When to stop restarting."""

    budget: BudgetField = knob(
        Budget(count=8, window_s=3600.0), "Failures that are restarted from within a window.", unit="count per duration",
        failure="a job that fails again and again and is paid for all the same",
    )  # fmt: skip
    ceiling: int = knob(50, "Restarts in the whole job.", unit="count", failure="an endless job", ge=0, le=10_000)
    backoff: Backoff = Backoff()
    same_step: int = knob(
        3, "The same first error at the same step this often ends the job.", unit="count", ge=2, le=100,
        failure="a bug of the script that no restart heals",
    )  # fmt: skip


class FailureRule(_Model):
    """What to do about one cause; `exit_code` narrows it to a worker's exit code."""

    cause: FailureCause | Literal["any"]
    exit_code: int | None = Field(None, ge=1, le=255)
    respond: Response


class Elastic(_Model):
    """Which hosts the job needs; all of them, so far."""

    wait_for_return: Seconds = knob(
        60.0, "How long to wait for a host that went away.", unit="duration", failure="a host that never comes back",
        ge=1, le=86400,
    )  # fmt: skip


class Keep(_Model):
    """Which checkpoints stay."""

    last: int = knob(3, "The newest so many.", unit="count", failure="a newest checkpoint that is corrupt", ge=1, le=1000)
    every_steps: int | None = Field(
        None, alias="every", description="Also those at multiples of so many steps, or off.",
        json_schema_extra={"unit": "steps", "failure": "a model that went bad long ago"},
    )  # fmt: skip

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _parse_every(cls, value: Any) -> Any:
        if isinstance(value, dict) and "every" in value:
            every = value["every"]
            value = {**value, "every": None if every in (None, "off", False) else parse_steps(every)}
        return value


class Checkpoint(_Model):
    """Where and how often state is saved."""

    store: str = knob(
        "none", "A directory, s3://bucket/prefix, or none.", unit="path or URL", failure="the loss of a host", min_length=1
    )
    every: CadenceField = knob(
        Cadence(), "How often a checkpoint is committed to the store.", unit="steps or duration", failure="the loss of a host"
    )
    snapshot_every: CadenceField = knob(
        Cadence(), "How often the state is copied into memory.", unit="steps", failure="the death of a worker"
    )
    keep: Keep = Keep()


class InterruptionKnobs(_Model):
    """What to do when the platform takes the host away."""

    grace: Seconds = knob(
        110.0, "Time from the notice until the platform kills the container.", unit="duration", ge=1, le=3600,
        failure="a save that is cut off",
    )  # fmt: skip
    script_grace: Seconds = knob(
        3.0, "Time that a script which reports no steps has after its SIGTERM.", unit="duration", ge=0, le=3600,
        failure="a script that saves by itself and is killed over it",
    )  # fmt: skip


class Gpu(_Model):
    """How GPUs are watched."""

    poll: Seconds = knob(
        5.0, "How often GPUs are asked.", unit="duration", failure="a GPU that fails unseen", ge=0.5, le=3600
    )


class Health(_Model):
    """What is watched on a host."""

    gpu: Gpu = Gpu()


class CoordinationKnobs(_Model):
    """How hosts agree."""

    endpoints: Literal["embedded"] | tuple[str, ...] = knob(
        "embedded", "An etcd of keepstep's own, or the addresses of one that is there.", unit="host:port list",
        failure="the loss of the host that keeps etcd",
    )  # fmt: skip
    lease: Seconds = knob(
        5.0, "How long a silent node counts as alive.", unit="duration", failure="a host that is lost or cut off", ge=1, le=60
    )
    port: int = knob(2379, "The embedded etcd's client port.", unit="port", failure="a port that is taken", ge=1, le=65534)


class Telemetry(_Model):
    """What can be seen from outside."""

    listen: str = knob(
        "127.0.0.1:9404", "Where Prometheus scrapes; port 0 takes any free one.", unit="host:port",
        failure="a fault that nobody sees", pattern=r"^[^:\s]+:\d{1,5}$",
    )  # fmt: skip


class Policy(_Model):
    """Everything a user can set."""

    version: Literal[1] = 1
    launch: Launch = Launch()
    restart: Restart = Restart()
    failures: tuple[FailureRule, ...] = ()
    elastic: Elastic = Elastic()
    checkpoint: Checkpoint = Checkpoint()
    interruption: InterruptionKnobs = InterruptionKnobs()
    health: Health = Health()
    coordination: CoordinationKnobs = CoordinationKnobs()
    telemetry: Telemetry = Telemetry()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Policy:
        if self.restart.backoff.first > self.restart.backoff.max:
            raise ValueError("restart.backoff.first is longer than restart.backoff.max")
        snapshot, commit = self.checkpoint.snapshot_every, self.checkpoint.every
        if snapshot.seconds is not None:
            raise ValueError("checkpoint.snapshot_every counts steps: wanted auto or a number of steps as 10 steps")
        if snapshot.steps and commit.steps and snapshot.steps > commit.steps:
            raise ValueError("checkpoint.snapshot_every is longer than checkpoint.every: nothing new could be committed")
        if self.coordination.lease >= self.interruption.grace:
            raise ValueError("coordination.lease is as long as interruption.grace: a dead host would use the grace up")
        return self

    @property
    def snapshot_every_steps(self) -> int | None:
        """Steps between snapshots; None leaves it to keepstep."""
        return self.checkpoint.snapshot_every.steps

    @property
    def checkpoint_every(self) -> Cadence:
        """How often a checkpoint is committed."""
        return self.checkpoint.every

    def response_to(self, cause: FailureCause, exit_code: int | None) -> Response:
        """What to do about a failure: the first rule that matches, restart where none does."""
        for rule in self.failures:
            if rule.cause in ("any", cause) and rule.exit_code in (None, exit_code):
                return rule.respond
        return "restart"
