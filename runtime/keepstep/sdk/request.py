"""From a few options to the request that makes a training job, checked against the service's own model of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from keepstep.core.values import frozen
from keepstep.errors import ConfigError

if TYPE_CHECKING:
    from botocore.model import Shape

OPERATION = "CreateTrainingJob"
MAX_RUN_S_MIN = 300
_OPEN_ENDED = frozenset({"InstanceType"})
"""Sets that grow with the service: what this botocore does not know may be newer than it is."""


@frozen
class JobOptions:
    """What a training job is made of; durations in seconds, sizes in GB.

    Attributes:
        name: the training job's own name, never used twice.
        lineage: the name under which checkpoints are kept: a later job with the same one goes on from them.
        image: with keepstep as its ENTRYPOINT.
        code: s3:// URL of the packed code; None where it is in the image.
        arguments: of `keepstep train`, knobs of the policy among them.
        channels: S3 URL by channel's name.
        metrics: regular expression by metric's name.
        checkpoints: S3 URL that the platform keeps /opt/ml/checkpoints at, for files that a script writes itself.
    """

    name: str
    lineage: str
    image: str
    role: str
    script: str
    output: str
    store: str
    instance_type: str = "ml.c5.xlarge"
    instance_count: int = 1
    volume_gb: int = 30
    code: str | None = None
    policy: str | None = None
    arguments: tuple[str, ...] = ()
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    checkpoints: str | None = None
    kms_key: str | None = None
    max_run_s: int = 86_400
    spot: bool = False
    max_wait_s: int | None = None
    retries: int = 0
    keep_alive_s: int = 0
    encrypt_traffic: bool = False


def training_job(options: JobOptions) -> dict[str, Any]:
    """The request, with nothing in it that was not asked for.

    Raises:
        ConfigError: options contradict each other.
    """
    _check(options)
    algorithm: dict[str, Any] = {"TrainingImage": options.image, "TrainingInputMode": "File"}
    if options.arguments:
        algorithm["ContainerArguments"] = ["train", *options.arguments]
    if options.metrics:
        algorithm["MetricDefinitions"] = [{"Name": name, "Regex": regex} for name, regex in options.metrics.items()]
    resources = {
        "InstanceType": options.instance_type, "InstanceCount": options.instance_count,
        "VolumeSizeInGB": options.volume_gb,
    } | ({"KeepAlivePeriodInSeconds": options.keep_alive_s} if options.keep_alive_s else {})  # fmt: skip
    output = {"S3OutputPath": options.output} | ({"KmsKeyId": options.kms_key} if options.kms_key else {})
    request: dict[str, Any] = {
        "TrainingJobName": options.name,
        "RoleArn": options.role,
        "AlgorithmSpecification": algorithm,
        "HyperParameters": _hyperparameters(options),
        "Environment": _environment(options),
        "OutputDataConfig": output,
        "ResourceConfig": resources,
        "StoppingCondition": {"MaxRuntimeInSeconds": options.max_run_s},
    }
    if options.channels:
        request["InputDataConfig"] = [_channel(name, url) for name, url in options.channels.items()]
    if options.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = options.max_wait_s or 2 * options.max_run_s
    if options.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": options.retries}
    if options.checkpoints:
        request["CheckpointConfig"] = {"S3Uri": options.checkpoints, "LocalPath": "/opt/ml/checkpoints"}
    if options.subnets:
        request["VpcConfig"] = {"Subnets": list(options.subnets), "SecurityGroupIds": list(options.security_groups)}
    if options.encrypt_traffic:
        request["EnableInterContainerTrafficEncryption"] = True
    if options.tags:
        request["Tags"] = [{"Key": key, "Value": value} for key, value in options.tags.items()]
    return request


def _check(options: JobOptions) -> None:
    if options.spot and options.store == "none":
        found = "--spot with --store none"
        raise ConfigError(found, "a store: what is not committed is lost with the Spot capacity", key="--store")
    if options.max_wait_s is not None and not options.spot:
        raise ConfigError("--max-wait without --spot", "--spot with it", key="--max-wait")
    if options.max_wait_s is not None and options.max_wait_s < options.max_run_s:
        raise ConfigError(
            f"found {options.max_wait_s} s", f"--max-run ({options.max_run_s} s) or more", key="--max-wait"
        )
    if options.max_run_s < MAX_RUN_S_MIN:
        found, wanted = f"found {options.max_run_s} s", f"{MAX_RUN_S_MIN} s or more: the last of it is for saving"
        raise ConfigError(found, wanted, key="--max-run")
    if bool(options.subnets) != bool(options.security_groups):
        raise ConfigError("one without the other", "both --subnet and --security-group", key="--subnet")
    if options.keep_alive_s and options.spot:
        raise ConfigError(
            "--keep-alive with --spot", "one of the two: there are no warm Spot pools", key="--keep-alive"
        )


def _hyperparameters(options: JobOptions) -> dict[str, str]:
    own = {"sagemaker_program": options.script}
    if options.code is not None:
        own["sagemaker_submit_directory"] = options.code
    twice = sorted(own.keys() & options.hyperparameters.keys())
    if twice:
        raise ConfigError(f"found {twice[0]}", "--script and --source in its place", key="--hyperparameter")
    return own | dict(options.hyperparameters)


def _environment(options: JobOptions) -> dict[str, str]:
    own = {
        "KEEPSTEP_JOB_NAME": options.lineage, "KEEPSTEP_STORE": options.store,
        "KEEPSTEP_MAX_RUNTIME": f"{options.max_run_s}s",
    }  # fmt: skip
    if options.policy is not None:
        own["KEEPSTEP_POLICY"] = options.policy
    return own | dict(options.environment)


def _channel(name: str, url: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": url, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


# --- checking ---


def check_request(request: Mapping[str, Any]) -> None:
    """Hold a request against botocore's model of the service: names, types, lengths, patterns, closed sets.

    Raises:
        ConfigError: all that is wrong, the first of it named by its path.
    """
    from botocore.session import get_session  # for which no other command waits
    from botocore.validate import ParamValidator

    model = get_session().get_service_model("sagemaker").operation_model(OPERATION).input_shape
    report = ParamValidator().validate(dict(request), model)
    faults = [report.generate_report()] if report.has_errors() else list(_faults(request, model, ""))
    if faults:
        raise ConfigError("; ".join(faults), f"a request as {OPERATION} takes it", file="request")


def _faults(value: Any, shape: Shape, path: str) -> Iterator[str]:
    """What the service would refuse beyond what botocore checks itself."""
    limits = shape.metadata
    if shape.type_name == "structure":
        for name, part in value.items():
            yield from _faults(part, shape.members[name], f"{path}.{name}".lstrip("."))
        return
    if shape.type_name == "list":
        for number, part in enumerate(value):
            yield from _faults(part, shape.member, f"{path}[{number}]")
    if shape.type_name == "map":
        for key, part in value.items():
            yield from _faults(key, shape.key, f"{path}.{key}")
            yield from _faults(part, shape.value, f"{path}.{key}")
    size = value if shape.type_name in ("integer", "long") else len(value) if hasattr(value, "__len__") else 0
    if "max" in limits and size > limits["max"]:
        yield f"{path}: {size} is more than {limits['max']}"
    if shape.type_name == "string":
        pattern = limits.get("pattern")
        if pattern and not _matches(pattern, value):
            yield f"{path}: {value!r} does not match {pattern}"
        allowed = getattr(shape, "enum", [])
        if allowed and value not in allowed and path.rpartition(".")[2] not in _OPEN_ENDED:
            yield f"{path}: {value!r} is none of {', '.join(allowed)}"


def _matches(pattern: str, value: str) -> bool:
    """Whether a value has the model's pattern, whose sets of letters have Java's names; the rest the service judges."""
    for theirs, ours in ((r"\p{L}", r"\w"), (r"\p{N}", r"\d"), (r"\p{Z}", r"\s")):
        pattern = pattern.replace(theirs, ours)
    try:
        return re.fullmatch(pattern, value) is not None
    except re.error:
        return True
