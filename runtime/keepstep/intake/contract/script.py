"""Which script to run, where it lies, and what it is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError
from keepstep.intake.contract.hyperparameters import to_arguments, users_own
from keepstep.intake.contract.values import ContractOptions, Paths
from keepstep.intake.files import printable, show

WANTED = "a Python script that can be read"
_NO_SCRIPT_HINT = "name it on the command line (keepstep train SCRIPT [ARGS...]) or as hyperparameter sagemaker_program"


@dataclass(frozen=True, slots=True)
class Script:
    """The user's script, ready to be started."""

    entry: str
    path: Path
    arguments: tuple[str, ...]
    code_dir: Path


def find_script(
    options: ContractOptions, hyperparameters: Mapping[str, Any], environ: Mapping[str, str], paths: Paths
) -> Script:
    """The script of the command line, else that of SAGEMAKER_PROGRAM or of the hyperparameters.

    A script of the command line gets the command line's arguments alone, and the current directory to work in where it
    lies below it. One of the hyperparameters gets these as arguments, and works in the code folder.

    Raises:
        ConfigError: none is named, or what is named is no script that can be read.
    """
    if options.script is not None:
        folders = [Path.cwd(), paths.code, paths.code_channel]
        path, code_dir = _locate(options.script, folders, "command line", "SCRIPT")
        return Script(options.script, path, options.arguments, code_dir)
    entry = environ.get("SAGEMAKER_PROGRAM") or hyperparameters.get("sagemaker_program")
    if entry is None:
        raise ConfigError("no script is named", "a script to train with", key="SCRIPT", hint=_NO_SCRIPT_HINT)
    where = "environment" if environ.get("SAGEMAKER_PROGRAM") else "hyperparameters.json"
    key = "SAGEMAKER_PROGRAM" if environ.get("SAGEMAKER_PROGRAM") else "sagemaker_program"
    if not isinstance(entry, str) or not entry:
        raise ConfigError(f"found {show(entry)}", "the name of a Python script", file=where, key=key)
    submitted = hyperparameters.get("sagemaker_submit_directory")
    path, code_dir = _locate(entry, [paths.code, paths.code_channel], where, key, submitted)
    return Script(entry, path, (*to_arguments(users_own(hyperparameters)), *options.arguments), code_dir)


def _locate(entry: str, folders: list[Path], where: str, key: str, submitted: object = None) -> tuple[Path, Path]:
    """Absolute path of a script, and the folder that it was found from."""
    candidates = [(folder / entry, folder) for folder in folders]
    if os.path.isabs(entry):
        candidates = [(Path(entry), next((f for f in folders if Path(entry).is_relative_to(f)), Path(entry).parent))]
    for path, folder in candidates:
        try:
            if path.exists():
                _check_script(path, where, key)
                return path.absolute(), folder.absolute()
        except OSError as error:
            raise ConfigError(f"{printable(str(path))}: {error.strerror}", WANTED, file=where, key=key) from None
    looked = ", ".join(printable(str(folder)) for _, folder in candidates)
    hint = None
    if isinstance(submitted, str) and submitted.startswith("s3://"):
        hint = f"the code lies in {printable(submitted)}: give it as an input channel named code, unpacked"
    raise ConfigError(f"{printable(entry)} is not there (looked in {looked})", WANTED, file=where, key=key, hint=hint)


def _check_script(path: Path, where: str, key: str) -> None:
    name = printable(str(path))
    if path.is_dir():
        raise ConfigError(f"{name} is a directory", WANTED, file=where, key=key)
    if not path.is_file():
        raise ConfigError(f"{name} is no plain file", WANTED, file=where, key=key)
    if path.suffix == ".sh":
        raise ConfigError(f"{name} is a shell script", WANTED, file=where, key=key)
    with path.open("rb"):
        return
