"""A process that gets a job's code or its packages, and ends: what loads boto3, or waits for pip, is not the agent.

`python -m keepstep.app.provisioner` reads one task, a JSON object, from its standard input, and answers on its standard
output with `{}` or with what is wrong: `error` (its kind), `found`, `wanted`, `key` and `hint`.

    fetch    source, into, mark, [region, endpoint]         an archive, a folder or a file, into an empty folder
    install  python, words, folder, environment, [arn]      packages, into the user's interpreter
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from keepstep import kernel
from keepstep.adapters.code_archive import unpack
from keepstep.adapters.packages import install
from keepstep.errors import ConfigError, KeepstepError


def main() -> int:
    """Carry out the task of the standard input."""
    kernel.die_with_parent(os.getppid())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the agent's is not that of what pip starts
    task = json.load(sys.stdin)
    answer: dict[str, str] = {}
    try:
        (fetch if task.pop("task") == "fetch" else install_packages)(**task)
    except ConfigError as error:
        answer = {"error": "config", "found": error.found, "wanted": error.wanted, "key": error.key, "hint": error.hint}
    except KeepstepError as error:
        answer = {"error": "store", "found": str(error), "hint": error.hint}
    except OSError as error:
        answer = {"error": "config", "found": str(error), "wanted": "a folder that can be written, with room in it"}
    print(json.dumps(answer))
    return 0


def fetch(source: str, into: str, mark: str, region: str | None = None, endpoint: str | None = None) -> None:
    """Fill a folder from an S3 object, a local archive, a folder or a single file.

    Args:
        mark: a file in the folder, there as long as the folder is not whole.
    """
    folder = Path(into)
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / mark).exists():
            return  # somebody's own code
        _clear(folder, mark)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()
    if source.startswith("s3://"):
        from keepstep.adapters.code_source import download  # boto3, for which nothing else waits

        with tempfile.TemporaryDirectory(prefix="keepstep-code-") as temporary:
            archive = Path(temporary) / "archive"
            download(source, archive, region, endpoint)
            unpack(archive, folder)
    elif Path(source).is_dir():
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    elif Path(source).suffix == ".py":
        shutil.copy(source, folder)
    else:
        unpack(Path(source), folder)
    (folder / mark).unlink()


def install_packages(
    python: str, words: list[str], folder: str, environment: dict[str, str], arn: str | None = None
) -> None:
    """Install packages, from a CodeArtifact repository where one is named."""
    if arn:
        from keepstep.adapters.code_source import package_index  # as above

        environment = {**environment, "PIP_INDEX_URL": package_index(arn)}
    install(python, words, Path(folder), environment, _say)


def _say(line: str) -> None:
    print(f"keepstep | pip: {line}", file=sys.stderr, flush=True)


def _clear(folder: Path, mark: str) -> None:
    """Take away what an earlier attempt left, but for its mark."""
    for path in folder.iterdir():
        if path.name == mark:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
