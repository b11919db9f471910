"""Everything that the platform and the command line say, put together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.core.knobs import parse_store
from keepstep.errors import ConfigError
from keepstep.intake.contract.documents import Document, read_document
from keepstep.intake.contract.hyperparameters import parse_hyperparameters
from keepstep.intake.contract.resources import Resources, parse_resources, single_host
from keepstep.intake.contract.script import SUBMITTED, find_script
from keepstep.intake.contract.values import CodeSource, Contract, ContractOptions, Paths
from keepstep.intake.files import can_be_given, printable, show

JOB_VARIABLE = "TRAINING_JOB_NAME"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VARIABLES = (JOB_VARIABLE, "KEEPSTEP_JOB_NAME", "KEEPSTEP_POLICY", "KEEPSTEP_STORE", "SAGEMAKER_PROGRAM")
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")


def load_contract(base_dir: Path, environ: Mapping[str, str], options: ContractOptions | None = None) -> Contract:
    """Read the platform's files below `base_dir`.

    Without `resourceconfig.json`, a script named on the command line is trained on one host, as on a laptop; but never
    where the platform is there and only its file is not, since each host would then train alone.

    Raises:
        ConfigError: something can not be used; exit code 78.
    """
    options = options or ContractOptions()
    _check_words(options, environ)
    paths = Paths(base_dir.absolute())
    hyperparameters = _read_hyperparameters(paths)
    resources = _read_resources(paths, environ, options)
    channels = _read_channels(paths)
    script = find_script(options, hyperparameters, environ, paths)
    return Contract(
        job_name=_job_name(environ, hyperparameters),
        current_host=resources.current_host,
        hosts=resources.hosts,
        network_interface_name=resources.network_interface_name,
        resource_config=resources.config,
        input_data_config=channels,
        hyperparameters=hyperparameters,
        channels={name: paths.input_data / name for name in sorted(channels)},
        entry=script.entry,
        kind=script.kind,
        script=script.path,
        arguments=script.arguments,
        code_dir=script.code_dir,
        is_submitted=options.script is None,
        policy_source=_policy_source(options, environ, hyperparameters, script.code_dir),
        store=_store(options, environ, hyperparameters),
        paths=paths,
    )


def find_code(base_dir: Path, environ: Mapping[str, str]) -> CodeSource | None:
    """Where the job's code is to be got from; None where nothing is said, or it lies where it belongs.

    Raises:
        ConfigError: the platform's files, or what they say of it, can not be used.
    """
    paths = Paths(base_dir.absolute())
    hyperparameters = _read_hyperparameters(paths)
    source = hyperparameters.get(SUBMITTED)
    if source in (None, "", str(paths.code)):
        return None
    file = printable(str(paths.input_config / "hyperparameters.json"))
    if not isinstance(source, str) or ("://" in source and not source.startswith("s3://")):
        raise ConfigError(f"found {show(source)}", "s3://bucket/key, or a path", file=file, key=SUBMITTED)
    if not source.startswith("s3://") and not os.path.exists(source):
        wanted = "an archive, a folder or a script that is there"
        raise ConfigError(f"{printable(source)} is not there", wanted, file=file, key=SUBMITTED)
    region = environ.get("AWS_REGION") or hyperparameters.get("sagemaker_region")
    region = region if isinstance(region, str) else None
    return CodeSource(source, paths.code, file, SUBMITTED, region, environ.get("S3_ENDPOINT_URL"))


def read_hosts(base_dir: Path, environ: Mapping[str, str]) -> Resources:
    """Who the hosts are, for whom nothing else of the contract matters.

    Raises:
        ConfigError: the platform does not say, or says what can not be used.
    """
    return _read_resources(Paths(base_dir.absolute()), environ, ContractOptions())


def _check_words(options: ContractOptions, environ: Mapping[str, str]) -> None:
    """What is not UTF-8 comes from the command line and the environment as halves of surrogate pairs."""
    words = [("SCRIPT", options.script), *(("ARGS", word) for word in options.arguments)]
    words += [
        ("--policy", options.policy),
        ("--store", options.store),
        *((key, environ.get(key)) for key in _VARIABLES),
    ]
    for key, word in words:
        if not can_be_given(word):
            raise ConfigError(f"found {show(word)}", "text in UTF-8, without NUL", key=key)


def _read_hyperparameters(paths: Paths) -> dict[str, Any]:
    document = read_document(paths.input_config / "hyperparameters.json")
    return {} if document is None else parse_hyperparameters(document)


def _read_resources(paths: Paths, environ: Mapping[str, str], options: ContractOptions) -> Resources:
    file = paths.input_config / "resourceconfig.json"
    document = read_document(file)
    if document is not None:
        return parse_resources(document)
    if options.script is None or environ.get(JOB_VARIABLE) or paths.input_config.is_dir():
        raise ConfigError(
            "the file is missing",
            "the platform's description of the hosts",
            file=printable(str(file)),
            hint="outside of SageMaker, name the script on the command line: keepstep train SCRIPT [ARGS...]",
        )
    return single_host()


def _read_channels(paths: Paths) -> Mapping[str, Any]:
    document = read_document(paths.input_config / "inputdataconfig.json") or Document("")
    for name, channel in document.values.items():
        if _CHANNEL.fullmatch(name) is None or name in (".", ".."):
            raise document.error(name, f"found the channel {show(name)}", "a name of letters, digits, . _ and -")
        if not isinstance(channel, dict):
            raise document.error(name, f"found {show(channel)}", "a channel's description, a JSON object")
    return document.values


def _job_name(environ: Mapping[str, str], hyperparameters: Mapping[str, Any]) -> str:
    """KEEPSTEP_JOB_NAME lets one job go on where another one left: the platform's own names never repeat."""
    sources: tuple[tuple[str, object], ...] = (
        ("KEEPSTEP_JOB_NAME", environ.get("KEEPSTEP_JOB_NAME")),
        ("keepstep_job_name", hyperparameters.get("keepstep_job_name")),
        (JOB_VARIABLE, environ.get(JOB_VARIABLE)),
        ("sagemaker_job_name", hyperparameters.get("sagemaker_job_name")),
    )
    key, name = _first(sources, ("", "local"))
    if not isinstance(name, str) or _JOB.fullmatch(name) is None:
        raise ConfigError(f"found {show(name)}", "a name of letters, digits, . _ and -, 128 at most", key=key)
    return name


def _policy_source(
    options: ContractOptions, environ: Mapping[str, str], hyperparameters: Mapping[str, Any], code_dir: Path
) -> str:
    sources: tuple[tuple[str, object], ...] = (
        ("--policy", options.policy),
        ("KEEPSTEP_POLICY", environ.get("KEEPSTEP_POLICY")),
        ("keepstep_policy", hyperparameters.get("keepstep_policy")),
    )
    key, source = _first(sources, ("", "default"))
    if not isinstance(source, str) or not source:
        raise ConfigError(f"found {show(source)}", "a preset's name or a YAML file", key=key)
    beside = code_dir / source
    if source.endswith((".yaml", ".yml")) and not os.path.exists(source) and os.path.isfile(beside):
        return str(beside)
    return source


def _store(options: ContractOptions, environ: Mapping[str, str], hyperparameters: Mapping[str, Any]) -> str | None:
    sources: tuple[tuple[str, object], ...] = (
        ("--store", options.store),
        ("KEEPSTEP_STORE", environ.get("KEEPSTEP_STORE")),
        ("keepstep_store", hyperparameters.get("keepstep_store")),
    )
    key, store = _first(sources, ("", None))
    if store is None:
        return None
    try:
        return parse_store(store)
    except ValueError as error:
        raise ConfigError(f"found {show(store)}", str(error), key=key) from None


def _first(sources: tuple[tuple[str, object], ...], default: tuple[str, object]) -> tuple[str, object]:
    """The first source that says something."""
    return next(((key, value) for key, value in sources if value is not None), default)
