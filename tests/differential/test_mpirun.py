"""mpirun's command is that of AWS's toolkit, save for what is listed here with its reason."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.app.options import parse_train_options
from keepstep.app.setting_up import read_setup
from keepstep.core.launch import plan_worker
from keepstep.core.launch.table import RankTable
from tests.differential.jobs import Job, make_job
from tests.differential.test_toolkit import TOOLKIT, common

pytestmark = pytest.mark.integration

HOROVOD, DATA_PARALLEL = range(200, 220), range(220, 240)
ASK = """
import json, sys
from sagemaker_training import process, runner
kind = getattr(runner.RunnerType, sys.argv[1])
found = runner._get_by_runner_type(kind)
words = found._create_command()
if kind is runner.RunnerType.SMDataParallel:
    words = words + process.ProcessRunner._create_command(found)
print(json.dumps({"words": words, "variables": sorted(found._env_vars)}))
"""
_OPTIONS = (
    "", "-x FOO=1", "--NCCL_DEBUG WARN", "--NCCL_DEBUG=VERSION -verbose", "-x A=b --NCCL_DEBUG WARN --bind-to core",
    "-mca btl_base_verbose 30",
)  # fmt: skip
_INSTANCES = ("ml.p4d.24xlarge", "ml.c5.xlarge", "ml.g5.48xlarge", "ml.p5e.48xlarge", "ml.p3dn.24xlarge")

INTENDED = {
    "-x SM_*": "each rank has the variables of its own host, not all of them the first one's",
    "-x AWS_*": "each host has credentials of its own, and they stay out of a command's words",
    "-x LD_PRELOAD": "ranks are told their hosts by keepstep, whatever gethostname() says",
    "python -m mpi4py": "a rank that raises is ended at once by keepstep's own bootstrap, which wants no mpi4py",
}
"""Where the two differ, and why; entrypoints/README.md has the same table. The launch agent is added when it starts."""

seen: Counter[str] = Counter()


def make_mpi_job(seed: int, strategy: str) -> Job:
    """A job that the toolkit starts by mpirun, seen from its first host."""
    chance = random.Random(seed)
    job = make_job(seed, hosts=chance.choice([1, 2, 3, 8]))
    given = {name: value for name, value in job.hyperparameters.items() if not name.endswith("_enabled")}
    given["sagemaker_program"] = chance.choice(["train.py", "sub/train.py"])
    prefix = "sagemaker_mpi" if strategy == "horovod" else "sagemaker_distributed_dataparallel"
    given[f"{prefix}_enabled"] = "true"
    given[f"{prefix}_custom_mpi_options"] = json.dumps(chance.choice(_OPTIONS))
    if chance.random() < 0.7:
        given["sagemaker_mpi_num_of_processes_per_host"] = chance.choice(["1", "2", "8"])
    each = int(given.get("sagemaker_mpi_num_of_processes_per_host", "1"))
    if strategy == "horovod" and chance.random() < 0.3:
        given["sagemaker_mpi_num_processes"] = str(each * job.hosts - chance.choice([0, each - 1]))
    given.pop("sagemaker_distribution_instance_groups", None)
    if strategy == "smddp" and chance.random() < 0.5:
        given["sagemaker_instance_type"] = json.dumps(chance.choice(_INSTANCES))
    names = sorted(job.resources["hosts"])
    resources = {
        "current_host": names[0],
        "hosts": names,
        "network_interface_name": "eth0",
        "current_instance_type": chance.choice(_INSTANCES),
    }
    environ = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"} if chance.random() < 0.5 else {}
    return replace(job, hyperparameters=given, resources=resources, environ=job.environ | environ)


def toolkits(job: Job, base: Path, told: Path, kind: str) -> tuple[list[str], set[str]]:
    """The toolkit's words, and which variables it hands over to all ranks."""
    environment = common(job, told) | {"SAGEMAKER_BASE_DIR": str(base)}
    done = subprocess.run([TOOLKIT, "-c", ASK, kind], env=environment, cwd=base, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout.decode().splitlines()[-1])
    return said["words"], set(said["variables"])


def planned(job: Job, base: Path, told: Path) -> list[str]:
    words = ["--base-dir", str(base), "--scratch-dir", str(base / "scratch"), "--set", f"launch.python={TOOLKIT}"]
    setup = read_setup(parse_train_options([*words, "--set", "coordination.tls=off"]), common(job, told), 0)
    hosts = setup.job.hosts
    table = RankTable(1, hosts, tuple(f"{host}:20001" for host in hosts), len(hosts))
    command, _ = plan_worker(setup.job, table, 0, setup.policy)
    assert command[:4] == (str(TOOLKIT), "-m", "keepstep_worker", "--mpirun")
    return list(command[4:])


def without_intended(words: list[str], variables: set[str]) -> list[str]:
    """The toolkit's words without what is meant to be otherwise, which is counted."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word != "-x":
            kept.append(word)
            continue
        value = next(rest)
        if value in variables:
            seen["-x SM_*"] += 1
        elif re.fullmatch(r"AWS_\w+", value):
            seen["-x AWS_*"] += 1
        elif value.startswith("LD_PRELOAD="):
            seen["-x LD_PRELOAD"] += 1
        else:
            kept += [word, value]
    at = kept.index("mpi4py")
    seen["python -m mpi4py"] += 1
    return [*kept[: at - 1], "-m", "keepstep_worker", "--rank", *kept[at + 1 :]]


@pytest.mark.parametrize(
    ("seed", "strategy", "kind"),
    [*((seed, "horovod", "MPI") for seed in HOROVOD), *((seed, "smddp", "SMDataParallel") for seed in DATA_PARALLEL)],
)
def test_the_words_are_the_same(tmp_path: Path, seed: int, strategy: str, kind: str) -> None:
    job = make_mpi_job(seed, strategy)
    base, told = tmp_path / "ml", tmp_path / "told.json"
    job.write(base)
    theirs, variables = toolkits(job, base, told, kind)
    assert planned(job, base, told) == without_intended(theirs, variables)


def test_each_intended_difference_is_one() -> None:
    """Run after the others, on one process: a reason for nothing is not kept."""
    if not seen:
        pytest.skip("the comparisons ran in other processes")
    for name, reason in INTENDED.items():
        print(f"{seen[name]:4} x {name}: {reason}")
    assert sorted(INTENDED) == sorted(+seen)
