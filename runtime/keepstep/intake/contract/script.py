"""What to run, where it lies, and what it is given.

Source: sagemaker-training 5.1.4, `_entry_point_type.py`: what ends in .sh is a command; beside a setup.py anything else
is a module of that package; what ends in .py is a script, and the rest are commands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.core.job import EntryKind
from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.contract.hyperparameters import to_arguments, users_own
from keepstep.intake.contract.values import ContractOptions, Paths
from keepstep.intake.files import printable, show

WANTED = "a script, a package's module or a program that can be read"
SUBMITTED = "sagemaker_submit_directory"
_NO_SCRIPT_HINT = "name it on the command line (keepstep train SCRIPT [ARGS...]) or as hyperparameter sagemaker_program"


@frozen
class Script:
    """What the user runs, ready to be started.

    Attributes:
        entry: its name as the user gave it, and as it is to see itself.
        kind: what kind of thing it is.
        path: where it lies; of a module, the package's folder.
        arguments: its arguments.
        code_dir: the folder to work in.
    """

    entry: str
    kind: EntryKind
    path: Path
    arguments: tuple[str, ...]
    code_dir: Path


def find_script(
    options: ContractOptions, hyperparameters: Mapping[str, Any], environ: Mapping[str, str], paths: Paths
) -> Script:
    """What the command line names, else SAGEMAKER_PROGRAM or the hyperparameters.

    A script of the command line gets the command line's arguments alone, and the current directory to work in where it
    lies below it. One of the hyperparameters gets these as arguments, and works in the code folder.

    Raises:
        ConfigError: none is named, or what is named is nothing that can be run.
    """
    if options.script is not None:
        where, key = "command line", "SCRIPT"
        _check_name(options.script, where, key)
        path, code_dir = _locate(options.script, [Path.cwd(), paths.code, paths.code_channel], where, key)
        is_program = path.suffix == ".sh" or (path.suffix != ".py" and os.access(path, os.X_OK))
        return Script(options.script, "command" if is_program else "script", path, options.arguments, code_dir)
    entry = environ.get("SAGEMAKER_PROGRAM") or hyperparameters.get("sagemaker_program")
    if entry is None:
        raise ConfigError("no script is named", "a script to train with", key="SCRIPT", hint=_NO_SCRIPT_HINT)
    where = "environment" if environ.get("SAGEMAKER_PROGRAM") else "hyperparameters.json"
    key = "SAGEMAKER_PROGRAM" if environ.get("SAGEMAKER_PROGRAM") else "sagemaker_program"
    if not isinstance(entry, str) or not entry:
        raise ConfigError(f"found {show(entry)}", "the name of a script", file=where, key=key)
    _check_name(entry, where, key)
    arguments = (*to_arguments(users_own(hyperparameters)), *options.arguments)
    folders = [paths.code, paths.code_channel]
    package = next((folder for folder in folders if os.path.isfile(folder / "setup.py")), None)
    if package is not None and not entry.endswith(".sh"):
        return Script(entry, "module", package, arguments, package.absolute())
    path, code_dir = _locate(entry, folders, where, key, hyperparameters.get(SUBMITTED))
    return Script(entry, "script" if entry.endswith(".py") else "command", path, arguments, code_dir)


def _check_name(entry: str, where: str, key: str) -> None:
    """A name that could be taken for an option of the interpreter is none."""
    if entry.startswith("-"):
        wanted = f"a name that does not begin with -, as ./{printable(entry)}"
        raise ConfigError(f"found {show(entry)}", wanted, file=where, key=key)


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
    if isinstance(submitted, str) and submitted:
        hint = f"{SUBMITTED} is {printable(submitted)}; it is fetched only where {folders[0]} is empty"
    raise ConfigError(f"{printable(entry)} is not there (looked in {looked})", WANTED, file=where, key=key, hint=hint)


def _check_script(path: Path, where: str, key: str) -> None:
    name = printable(str(path))
    if path.is_dir():
        raise ConfigError(f"{name} is a directory", WANTED, file=where, key=key)
    if not path.is_file():
        raise ConfigError(f"{name} is no plain file", WANTED, file=where, key=key)
    with path.open("rb"):
        return
