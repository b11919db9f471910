"""Where things lie on this host, and what all its workers have in common."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import keepstep
import keepstep_worker
from keepstep.core.values import frozen

FAILURE_BYTES_MAX = 1024
"""The platform shows no more of a failure file."""
_HINT = "\nhint: "
TLS_FOLDER = "tls"


@frozen
class Places:
    """Folders of this host: scratch for what may be lost, output for what is kept with the job, code to run in."""

    scratch: Path
    output: Path
    code: Path
    failure_file: Path

    @property
    def guest(self) -> Path:
        """What workers find `keepstep_worker` in."""
        return self.scratch / "guest"

    @property
    def tls(self) -> Path:
        """Where this host's certificate and key lie, if it has any."""
        return self.scratch.absolute() / TLS_FOLDER

    @property
    def sessions(self) -> Path:
        """Where what mpirun has run on this host keeps its files."""
        return self.scratch.absolute() / "mpi"


def write_failure(path: Path, text: str) -> None:
    """Write a failure file, cut to what the platform shows; a hint behind a long message is kept.

    Raises:
        OSError: it can not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    said, sign, hint = text.rpartition(_HINT)
    room = FAILURE_BYTES_MAX - len((sign + hint).encode())
    shown = said.encode()[:room].decode(errors="ignore") + sign + hint if sign and room > 0 else text
    path.write_text(shown.encode()[:FAILURE_BYTES_MAX].decode(errors="ignore"), encoding="utf-8")


def make_guest(folder: Path) -> Path:
    """A folder that holds `keepstep_worker` and nothing else, so that the agent's packages never meet the user's."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "keepstep_worker"
    source = Path(keepstep_worker.__file__).parent
    if not link.is_symlink() or link.resolve() != source:
        link.unlink(missing_ok=True)
        link.symlink_to(source, target_is_directory=True)
    return folder


def forget_own_source(environment: dict[str, str]) -> None:
    """Take the agent's own source tree, where it runs from one, out of what the user's Python searches."""
    own = str(Path(keepstep.__file__).parents[1])
    parts = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.abspath(p) != own]
    if parts:
        environment["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        environment.pop("PYTHONPATH", None)


def whole_environment(environment: Mapping[str, str], guest: Path, more: Mapping[str, str]) -> dict[str, str]:
    """A worker's whole environment.

    Args:
        environment: the user's.
        guest: the folder that `make_guest` has made.
        more: what is the worker's own.
    """
    whole = {**environment, **more, "KEEPSTEP_PARENT_PID": str(os.getpid())}
    searched = filter(None, (str(guest), whole.get("PYTHONPATH")))
    whole["PYTHONPATH"] = os.pathsep.join(searched)
    whole.setdefault("PYTHONUNBUFFERED", "1")
    return whole


def find_interpreter(python: str, code: Path, search_path: str | None) -> str | None:
    """The path of the user's interpreter, found as a worker's start finds it; None where there is none.

    Args:
        python: a name on the search path, or a path from the folder that the code is in.
    """
    return shutil.which(str(code / python) if os.sep in python else python, path=search_path)
