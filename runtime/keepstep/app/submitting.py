"""`keepstep submit`: a training job from a policy and a few options, then its log and status until it has ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import sleep, unix_time
from keepstep.core.knobs import parse_store
from keepstep.core.quantities import parse_seconds
from keepstep.errors import ConfigError, ExitCode
from keepstep.intake.policy import load_sourced_policy
from keepstep.sdk.packing import pack
from keepstep.sdk.request import JobOptions, check_request, training_job

_POLICY = "keepstep-policy.yaml"
_LOOK_S = 5.0
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,46}")
"""Sixteen letters of a training job's 63 are the time's."""


def add_command(commands: Any) -> None:
    """Add `submit` to the parser's commands."""
    text = "run a script as a SageMaker training job; the image has keepstep as its ENTRYPOINT"
    parser = commands.add_parser("submit", help=text, description=text)
    must = parser.add_argument_group("what every job has")
    must.add_argument("--name", required=True, help="of the training: a later job of this name goes on where it was")
    must.add_argument("--image", required=True, help="URI of the image")
    must.add_argument("--role", required=True, help="ARN of the role that the job runs as")
    must.add_argument("--script", required=True, help="what is run, seen from --source")
    must.add_argument("--output", required=True, metavar="S3_URL", help="where models, code and checkpoints go")
    code = parser.add_argument_group("code and data")
    code.add_argument("--source", type=Path, metavar="DIR", help="folder with the script (default: it is in the image)")
    code.add_argument("--input", action="append", default=[], type=_pair, metavar="CHANNEL=S3_URL")
    code.add_argument("--hyperparameter", action="append", default=[], type=_pair, metavar="NAME=VALUE")
    code.add_argument("--env", action="append", default=[], type=_pair, metavar="NAME=VALUE")
    kept = parser.add_argument_group("faults and checkpoints")
    kept.add_argument("--policy", default="default", help="a preset's name or a file (default: default)")
    kept.add_argument("--set", action="append", default=[], dest="overrides", metavar="KNOB=VALUE", help="set one knob")
    kept.add_argument("--store", help="for checkpoints (default: OUTPUT/keepstep)")
    kept.add_argument("--checkpoints", metavar="S3_URL", help="where the platform keeps /opt/ml/checkpoints")
    kept.add_argument("--spot", action="store_true", help="on Spot capacity")
    kept.add_argument("--max-wait", type=_seconds, metavar="TIME", help="for Spot capacity, the run included")
    kept.add_argument("--retries", type=int, default=0, help="of the platform, after its own errors (0 to 30)")
    where = parser.add_argument_group("where it runs")
    where.add_argument("--instance-type", default="ml.c5.xlarge", metavar="TYPE")
    where.add_argument("--instance-count", type=int, default=1, metavar="N")
    where.add_argument("--volume", type=int, default=30, metavar="GB")
    where.add_argument("--max-run", type=_seconds, default=86_400, metavar="TIME", help="(default 24h)")
    where.add_argument("--keep-alive", type=_seconds, default=0, metavar="TIME", help="of a warm pool, after the job")
    where.add_argument("--subnet", action="append", default=[])
    where.add_argument("--security-group", action="append", default=[])
    where.add_argument("--kms-key", help="that encrypts the output")
    where.add_argument("--encrypt-traffic", action="store_true", help="between hosts, by the platform")
    where.add_argument("--region")
    where.add_argument("--profile", help="of AWS's configuration")
    seen = parser.add_argument_group("what is seen of it")
    seen.add_argument("--metric", action="append", default=[], type=_pair, metavar="NAME=REGEX")
    seen.add_argument("--tag", action="append", default=[], type=_pair, metavar="KEY=VALUE")
    seen.add_argument("--no-wait", action="store_true", help="leave once the job is made")
    seen.add_argument("--dry-run", action="store_true", help="print the request, checked, and make nothing")
    parser.set_defaults(command=submit)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted NAME=VALUE")
    return name, value


def _seconds(text: str) -> int:
    try:
        return int(parse_seconds(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted {error}") from None


def submit(options: argparse.Namespace) -> int:
    """Make the job and follow it; the exit code is 0 where it completes, 1 where it fails, 143 where it is stopped.

    Raises:
        ConfigError: an option can not be used, or AWS does not take the request.
        StoreRefusedError: AWS does not answer.
    """
    stamp = datetime.fromtimestamp(unix_time(), UTC).strftime("%Y%m%d-%H%M%S")
    job = read_options(options, stamp)
    request = training_job(job)
    check_request(request)
    content = _pack(options)
    if options.dry_run:
        print(json.dumps(request, indent=2))
        return 0
    from keepstep.sdk.jobs import Jobs  # boto3, for which no other command waits

    jobs = Jobs(options.region, options.profile)
    if job.code is not None and content is not None:
        jobs.upload(job.code, content)
    print(f"keepstep submit | {jobs.create(request)}", flush=True)
    if options.no_wait:
        return 0
    try:
        ended = jobs.follow(job.name, lambda line: print(line, flush=True), lambda: asyncio.run(sleep(_LOOK_S)))
    except KeyboardInterrupt:
        print(f"\nthe job goes on; `aws sagemaker stop-training-job --training-job-name {job.name}` stops it")
        return 130
    if ended.get("FailureReason"):
        print(f"keepstep submit | {ended['FailureReason']}", file=sys.stderr)
    return {"Completed": 0, "Stopped": int(ExitCode.INTERRUPTED)}.get(str(ended["TrainingJobStatus"]), 1)


def read_options(options: argparse.Namespace, stamp: str) -> JobOptions:
    """The command line as values.

    Raises:
        ConfigError: something can not be used.
    """
    if _NAME.fullmatch(options.name) is None:
        raise ConfigError(f"found {options.name!r}", "letters, digits and -, 47 at most", key="--name")
    output = options.output.rstrip("/")
    if not output.startswith("s3://"):
        raise ConfigError(f"found {options.output!r}", "s3://bucket/prefix", key="--output")
    name = f"{options.name}-{stamp}"
    policy = load_sourced_policy(options.policy, options.overrides).policy
    named = policy.checkpoint.store
    store = options.store or (named if named != "none" else f"{output}/keepstep")
    return JobOptions(
        name=name,
        lineage=options.name,
        image=options.image,
        role=options.role,
        script=_script(options),
        output=output,
        store=_store(store),
        instance_type=options.instance_type,
        instance_count=options.instance_count,
        volume_gb=options.volume,
        code=None if options.source is None else f"{output}/{name}/source/sourcedir.tar.gz",
        policy=_POLICY if _is_file(options.policy) else options.policy,
        arguments=tuple(word for override in options.overrides for word in ("--set", override)),
        hyperparameters=dict(options.hyperparameter),
        channels=dict(options.input),
        environment=dict(options.env),
        metrics=dict(options.metric),
        tags=dict(options.tag),
        subnets=tuple(options.subnet),
        security_groups=tuple(options.security_group),
        checkpoints=options.checkpoints,
        kms_key=options.kms_key,
        max_run_s=options.max_run,
        spot=options.spot,
        max_wait_s=options.max_wait,
        retries=options.retries,
        keep_alive_s=options.keep_alive,
        encrypt_traffic=options.encrypt_traffic,
    )


def _store(store: str) -> str:
    try:
        parse_store(store)
    except ValueError as error:
        raise ConfigError(f"found {store!r}", str(error), key="--store") from None
    if store != "none" and not store.startswith("s3://"):
        raise ConfigError(f"found {store!r}", "s3://bucket/prefix, which all hosts reach, or none", key="--store")
    return store


def _script(options: argparse.Namespace) -> str:
    if options.source is not None and not (options.source / options.script).is_file():
        raise ConfigError(f"{options.script} is not in {options.source}", "a script of that folder", key="--script")
    return str(options.script)


def _is_file(policy: str) -> bool:
    return policy.endswith((".yaml", ".yml"))


def _pack(options: argparse.Namespace) -> bytes | None:
    """The archive of the code, the policy's file within."""
    if options.source is None:
        if _is_file(options.policy):
            wanted = "--source with it, in which the file travels, or a preset"
            raise ConfigError(f"found the file {options.policy}", wanted, key="--policy")
        return None
    more = {_POLICY: Path(options.policy).read_bytes()} if _is_file(options.policy) else {}
    return pack(options.source, more)
