"""The policy: one frozen tree. Every knob has a unit, a range, a default and a failure it is for.

A value here is parsed text; where the text came from (file, line, preset) is the business of `intake/policy`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from keepstep.core.causes import FailureCause
from keepstep.core.contradictions import check
from keepstep.core.health_knobs import Health, Straggler
from keepstep.core.knobs import PORT_MAX, Section, knob, parse_encryption, parse_endpoint, parse_listen, parse_store
from keepstep.core.quantities import (
    Budget,
    Cadence,
    Every,
    RateOrOff,
    RestartBudget,
    Seconds,
    SecondsAutoOrOff,
    SecondsOrOff,
    StepsOrAuto,
    StepsOrOff,
    parse_folder,
)

_HOSTS_MAX = 4096

Response = Literal["restart", "stop", "exit"]


class Launch(Section):
    """How workers are started."""

    strategy: Literal[
        "auto", "plain", "mirrored", "multi_worker", "parameter_server", "parameter_server_v1", "horovod", "smddp"
    ] = knob(
        "auto", "How the script is distributed; auto asks the platform, the hosts and the GPUs.", unit="name",
        failure="a script started for another world than its own",
    )  # fmt: skip
    instrument: Literal["auto", "off"] = knob(
        "auto", "Whether Model.fit of an unchanged script reports its steps, is snapshotted and resumed.", unit="name",
        failure="a script that does not bear being instrumented",
    )  # fmt: skip
    standby: int = knob(
        1, "Processes that have TensorFlow imported and wait for a restart; one more after the first restart.",
        unit="count", failure="restarts of which most is the import of TensorFlow", ge=0, le=4, strict=True,
    )  # fmt: skip
    ranks: int = knob(
        0, "Ranks that mpirun starts on each host; 0: as many as the platform says, or one for each GPU.", unit="count",
        failure="GPUs without a rank, or ranks without a GPU", ge=0, le=1024, strict=True,
    )  # fmt: skip
    evaluator: Literal["off", "on"] = knob(
        "off", "Whether, with parameter servers, one more process of the script evaluates beside the chief.",
        unit="name", failure="training that waits for its evaluation",
    )  # fmt: skip
    data_service: str = knob(
        "none", "The instance group whose hosts run tf.data's service for those that train, or none.", unit="name",
        failure="GPUs that wait for data", min_length=1, max_length=64,
    )  # fmt: skip
    arguments: Literal["exec", "shell"] = knob(
        "exec", "How the script gets its arguments: as they are, or as a shell splits and expands them.", unit="name",
        failure="a script that relies on what older toolkits made of a value with blanks in it",
    )  # fmt: skip
    python: str = knob(
        "python", "The interpreter of the user's script: a path, or a name on PATH.", unit="path",
        failure="a script run by an interpreter that lacks its packages", min_length=1,
    )  # fmt: skip


class Backoff(Section):
    """How long to wait before a restart; doubled with each failure in the budget's window."""

    first: Seconds = knob(
        0.0, "Wait before the first restart.", unit="duration", failure="a fault that needs a moment to pass", ge=0,
        le=3600,
    )  # fmt: skip
    max: Seconds = knob(
        60.0, "The longest wait before a restart.", unit="duration", failure="a crash loop that idles paid hosts", ge=0,
        le=86400,
    )  # fmt: skip


class Restart(Section):
    """When to stop restarting."""

    budget: Budget = knob(
        RestartBudget(8, 3600.0),
        "Failures that are restarted from within a window; what lies before a committed step is forgiven.",
        unit="count per duration", failure="a job that fails again and again and is paid for all the same",
    )  # fmt: skip
    ceiling: int = knob(
        50, "Restarts in the whole job, over all its attempts where there is a store.", unit="count",
        failure="a job that never ends", ge=0, le=10_000, strict=True,
    )  # fmt: skip
    backoff: Backoff = Backoff()
    same_step: int = knob(
        3, "The same first error at the same step this often ends the job.", unit="count",
        failure="a bug of the script that no restart heals", ge=2, le=100, strict=True,
    )  # fmt: skip
    bad_batch: Literal["stop", "skip"] = knob(
        "stop", "What to do then: end the job, or once leave out that step's batch, where `run.dataset` gives it.",
        unit="name", failure="a night lost to one sample that no step survives",
    )  # fmt: skip


class Hang(Section):
    """When a world that does not get on is restarted; only of training that reports its steps."""

    deadline: SecondsAutoOrOff = knob(
        "auto", "Longest silence of a worker between two steps: a duration, off, or auto (by this world's own steps).",
        unit="duration", failure="a worker that hangs, which the others wait for without end",
    )  # fmt: skip
    factor: float = knob(
        10.0, "For auto: so many times the slowest of the recent steps.", unit="ratio",
        failure="steps of which some take far longer than others", ge=2.0, le=1000.0, strict=True,
    )  # fmt: skip
    floor: Seconds = knob(
        60.0, "A step is never given less than this.", unit="duration", failure="a step that something holds up", ge=1,
        le=86400,
    )  # fmt: skip
    first_step: Seconds = knob(
        1200.0, "Nor the start of a worker: import, restore, tracing and compiling, the first step.", unit="duration",
        failure="a compiler that takes its time", ge=1, le=86400,
    )  # fmt: skip
    data: Seconds = knob(
        600.0, "Nor the first step of an epoch, whose data are made ready.", unit="duration",
        failure="a shuffle buffer that is filled anew", ge=1, le=86400,
    )  # fmt: skip
    pause: Seconds = knob(
        1200.0, "Nor what lies between two steps: callbacks, checkpoints, each batch of an evaluation.",
        unit="duration", failure="a checkpoint that takes its time", ge=1, le=86400,
    )  # fmt: skip


class FailureRule(Section):
    """What to do about one cause; `exit_code` narrows it to a worker's exit code, `budget` is its own."""

    cause: FailureCause | Literal["any"]
    exit_code: int | None = Field(None, ge=1, le=255, strict=True)
    respond: Response
    budget: Budget | None = None

    @property
    def own(self) -> str:
        """What failures that are charged to its own budget are known by; empty where it has none."""
        return "" if self.budget is None else f"{self.cause}:{self.exit_code or 'any'}"

    def covers(self, other: FailureRule) -> bool:
        """Whether nothing is left for `other` when it comes after this rule."""
        return self.cause in ("any", other.cause) and self.exit_code in (None, other.exit_code)


DEFAULT_RULES = (
    FailureRule(cause=FailureCause.GPU_FAULT, respond="exit"),
    FailureRule(cause=FailureCause.OUT_OF_MEMORY, respond="stop"),
    FailureRule(cause="any", respond="restart"),
)


HostCount = Annotated[int, Field(ge=1, le=_HOSTS_MAX, strict=True)] | Literal["all"]


class Hosts(Section):
    """How many hosts may train together."""

    min: HostCount = knob(
        "all", "Hosts without which there is no training: fewer wait, and then give up.", unit="count or all",
        failure="a host that is lost for good", range=f"1 to {_HOSTS_MAX}",
    )  # fmt: skip
    max: HostCount = knob(
        "all", "Hosts that train at the most; the others stand by for one that is lost.", unit="count or all",
        failure="a host that is lost for good, with spares at hand", range=f"1 to {_HOSTS_MAX}",
    )  # fmt: skip


class Elastic(Section):
    """Which hosts the job needs: all of them, unless it is told otherwise."""

    hosts: Hosts = Hosts()
    spares: int = knob(
        0, "Hosts of the job that stand by for one that is lost, cordoned or slow.", unit="count",
        failure="a host that is lost for good, and a world that must not shrink", ge=0, le=_HOSTS_MAX, strict=True,
    )  # fmt: skip
    wait_for_return: Seconds = knob(
        60.0, "How long to wait for a host that went away, before going on without it or giving up.", unit="duration",
        failure="a host that never comes back", ge=1, le=86400,
    )  # fmt: skip
    grow: Literal["at_checkpoint", "off"] = knob(
        "at_checkpoint", "When a host that is back takes part again: right after the next checkpoint, or never.",
        unit="name", failure="a world that stays small once its hosts are back",
    )  # fmt: skip
    batch: Literal["keep_global", "keep_local"] = knob(
        "keep_global", "With fewer hosts: the same global batch in larger shares, or the same share of a smaller one.",
        unit="name", failure="a smaller world that trains something else",
    )  # fmt: skip


class Keep(Section):
    """Which checkpoints stay in the store."""

    last: int = knob(
        3, "The newest so many checkpoints stay.", unit="count", failure="a newest checkpoint that is corrupt", ge=1,
        le=1000, strict=True,
    )  # fmt: skip
    every: StepsOrOff = knob(
        None, "Checkpoints at multiples of so many steps stay for good, or off.", unit="steps",
        failure="a model that went bad long before it was seen",
    )  # fmt: skip

    @property
    def every_steps(self) -> int | None:
        """Steps whose multiples stay; None for none."""
        return self.every


class S3(Section):
    """How checkpoints are written to S3."""

    encryption: Annotated[str, AfterValidator(parse_encryption)] = knob(
        "bucket", "Who encrypts: bucket (by its own rule), kms (the account's key), or a KMS key's id, ARN or alias.",
        unit="name", failure="a bucket that refuses what another key encrypts",
    )  # fmt: skip
    upload_rate: RateOrOff = knob(
        None, "How fast a host uploads at the most, or off.", unit="bytes per second",
        failure="a line that the training needs for itself",
    )  # fmt: skip
    parts_in_flight: int = knob(
        4, "Parts of 16 MiB that a host sends at the same time, each with memory of its own.", unit="count",
        failure="a line that one stream does not fill", ge=1, le=64, strict=True,
    )  # fmt: skip


class Checkpoint(Section):
    """Where and how often state is saved."""

    store: Annotated[str, AfterValidator(parse_store)] = knob(
        "none", "Where checkpoints are committed: a directory that all hosts share, s3://bucket/prefix, or none.",
        unit="path or URL", failure="the loss of a host",
    )  # fmt: skip
    every: Every = knob(
        Cadence(), "How often a checkpoint is committed; auto goes by what a save takes and how often something fails.",
        unit="steps or duration", failure="the loss of a host",
    )  # fmt: skip
    snapshot_every: StepsOrAuto = knob(
        None, "How often state is copied into the host's memory; auto goes by its cost and how often something fails.",
        unit="steps", failure="the death of a worker or of the agent",
    )  # fmt: skip
    keep: Keep = Keep()
    divergence: Literal["block", "stop"] = knob(
        "block", "Where hosts differ in what must be equal: block leaves that checkpoint out, stop ends the job.",
        unit="name", failure="silent corruption that is trained on",
    )  # fmt: skip
    local: Annotated[str, AfterValidator(parse_folder)] = knob(
        "auto", "Folder on the host's own disk for copies of what it uploads: a path, off, or auto (a warm pool's).",
        unit="path", failure="a container that starts anew and reads its state from afar",
    )  # fmt: skip
    s3: S3 = S3()
    watch: Annotated[str, AfterValidator(parse_folder)] = knob(
        "auto", "Folder of checkpoints that the script writes itself, to be committed whole: a path, off, or auto (the "
        "platform's, where the script reports no steps).", unit="path", failure="files that a dying script tore",
    )  # fmt: skip


class Interruption(Section):
    """What to do when the platform takes the host away."""

    on: tuple[Literal["sigterm", "imds", "rebalance"], ...] = knob(
        ("sigterm", "imds"), "What counts as an interruption: the signal, a Spot notice, a rebalance recommendation.",
        unit="list of names", failure="a stop of the job by the platform", min_length=1, max_length=3,
    )  # fmt: skip
    grace: Seconds = knob(
        110.0, "Time from the notice until the platform kills the container.", unit="duration",
        failure="a save that is cut off", ge=1, le=3600,
    )  # fmt: skip
    script_grace: Seconds = knob(
        3.0, "Time that a script which reports no steps has after its SIGTERM.", unit="duration",
        failure="a script that saves by itself and is killed over it", ge=0, le=3600,
    )  # fmt: skip
    max_runtime: SecondsOrOff = knob(
        None, "The job's MaxRuntimeInSeconds, at whose end the platform ends it, or off; `grace` before is the save.",
        unit="duration", failure="the loss of what was done since the last checkpoint when the runtime is over",
    )  # fmt: skip


class Coordination(Section):
    """How hosts agree; a single host needs none of it."""

    endpoints: Literal["embedded"] | tuple[Annotated[str, AfterValidator(parse_endpoint)], ...] = knob(
        "embedded", "An etcd of keepstep's own on the first hosts, or the URLs of one that is there.",
        unit="list of URLs", failure="the loss of the host that keeps etcd", min_length=1,
    )  # fmt: skip
    lease: Seconds = knob(
        5.0, "How long a silent node counts as alive.", unit="duration",
        failure="a host that is lost, frozen or cut off", ge=1, le=60,
    )  # fmt: skip
    tls: Literal["on", "off"] = knob(
        "on", "Whether hosts prove to each other that they are of this job; needs a store, which all can read.",
        unit="name", failure="a stranger on the network who gives orders",
    )  # fmt: skip
    port: int = knob(
        2379, "Client port of keepstep's own etcd; the next one is taken for its members.", unit="port",
        failure="a port that is taken", ge=1, le=PORT_MAX - 1, strict=True,
    )  # fmt: skip


class Telemetry(Section):
    """What can be seen from outside."""

    listen: Annotated[str, AfterValidator(parse_listen)] = knob(
        "127.0.0.1:9404", "Where Prometheus scrapes this host's agent; port 0 takes any free one.", unit="host:port",
        failure="a fault that nobody sees",
    )  # fmt: skip


class Policy(Section):
    """Everything that a user can set."""

    version: Literal[1] = knob(
        1, "Version of the policy's format.", unit="number", failure="a policy of another keepstep"
    )
    launch: Launch = Launch()
    restart: Restart = Restart()
    failures: tuple[FailureRule, ...] = knob(
        DEFAULT_RULES,
        "What to do about a cause: restart, stop, or exit with 76; the first rule that matches holds.",
        unit="list of rules", failure="a failure that a restart would hide or repeat", max_length=50,
    )  # fmt: skip
    hang: Hang = Hang()
    straggler: Straggler = Straggler()
    elastic: Elastic = Elastic()
    checkpoint: Checkpoint = Checkpoint()
    interruption: Interruption = Interruption()
    health: Health = Health()
    coordination: Coordination = Coordination()
    telemetry: Telemetry = Telemetry()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Policy:
        check(self)
        return self

    @property
    def snapshot_every_steps(self) -> int | None:
        """Steps between snapshots; None leaves it to keepstep."""
        return self.checkpoint.snapshot_every

    @property
    def checkpoint_every(self) -> Cadence:
        """How often a checkpoint is committed."""
        return self.checkpoint.every

    def rule_for(self, cause: FailureCause, exit_code: int | None) -> FailureRule:
        """What to do about a failure: the first rule that matches, restart where none does."""
        for rule in self.failures:
            if rule.cause in ("any", cause) and rule.exit_code in (None, exit_code):
                return rule
        return FailureRule(cause="any", respond="restart")
