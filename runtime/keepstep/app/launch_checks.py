"""Whether what starts the ranks is there, looked at before anything begins: a clear word then saves the GPUs' hours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from keepstep.core.job import JobSpec
from keepstep.core.launch.mpi import LAUNCHED
from keepstep.errors import ConfigError

SMDDPRUN = "smddprun"
_LOOK_S = 120.0
_OPEN_MPI = re.compile(r"\(Open MPI\) (\d+)\.(\d+)")
_LAST_SMDDP = (2, 11)
_LOOK = """
import importlib.metadata as m, importlib.util as u, json
def has(name):
    try: return u.find_spec(name) is not None
    except ImportError: return False
def of(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
print(json.dumps({
    "tensorflow": of("tensorflow", "tensorflow-gpu", "tensorflow-cpu"),
    "smdistributed.dataparallel.tensorflow": has("smdistributed.dataparallel.tensorflow"),
    "horovod.tensorflow": has("horovod.tensorflow"),
}))
"""
_INSTEAD = "launch.strategy=multi_worker with MultiWorkerMirroredStrategy, or horovod"


def check_launcher(job: JobSpec, environment: Mapping[str, str], has_trust: bool, folder: Path) -> None:
    """See that mpirun is Open MPI's, that the strategy's library is installed, and that hosts can prove themselves.

    Raises:
        ConfigError: something is missing, or is another than is wanted.
    """
    if job.strategy not in LAUNCHED:
        return
    key = "launch.strategy"
    if len(job.hosts) > 1 and not has_trust:
        raise ConfigError(
            f"found {job.strategy} on several hosts without certificates of their own",
            "a store that all hosts can read, coordination.tls=on and coordination.endpoints=embedded",
            key=key,
            hint="mpirun has commands run on other hosts, and these take them from hosts of the job only",
        )
    _check_mpirun(environment.get("PATH"), key, job.strategy)
    found = _look(job, environment, folder)
    if job.strategy == "smddp":
        _check_smddp(found, key)
    elif not found.get("horovod.tensorflow"):
        raise ConfigError(
            f"found horovod, and {job.python} has no horovod.tensorflow",
            "an image with Horovod, built against its TensorFlow, or launch.strategy=multi_worker",
            key=key,
        )


def has_program(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a program is on PATH."""
    return shutil.which(name, path=environ.get("PATH")) is not None


def _check_mpirun(search_path: str | None, key: str, strategy: str) -> None:
    path = shutil.which("mpirun", path=search_path)
    if path is None:
        raise ConfigError(f"found {strategy}, and no mpirun on PATH", "an image with Open MPI 4", key=key)
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} can not be asked for its version: {error}", "Open MPI 4", key=key) from error
    told = done.stdout.decode(errors="replace").partition("\n")[0]
    version = _OPEN_MPI.search(told)
    if version is None or version[1] != "4":
        raise ConfigError(f"{path} is {told or 'nothing that tells its version'}", "Open MPI 4", key=key)


def _check_smddp(found: Mapping[str, object], key: str) -> None:
    version = found.get("tensorflow")
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(version))[:2])
    if version is not None and numbers > _LAST_SMDDP:
        last = ".".join(map(str, _LAST_SMDDP))
        raise ConfigError(
            f"found smddp with TensorFlow {version}: SageMaker's data parallel library ended at {last}",
            _INSTEAD,
            key=key,
        )
    if not found.get("smdistributed.dataparallel.tensorflow"):
        raise ConfigError(
            "found smddp, and smdistributed.dataparallel.tensorflow is not installed",
            f"one of AWS's images up to TensorFlow 2.11; or {_INSTEAD}",
            key=key,
        )


def _look(job: JobSpec, environment: Mapping[str, str], folder: Path) -> dict[str, object]:
    """What the user's interpreter has, without importing it."""
    words = [job.python, "-c", _LOOK]
    try:
        done = subprocess.run(
            words, env=dict(environment), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_S
        )
        found = json.loads(done.stdout.decode(errors="replace").strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{job.python} does not answer: {error}", "a Python interpreter", key="launch.python"
        ) from error
    return dict(found)
