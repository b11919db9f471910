"""What a script sees under keepstep is what it sees under AWS's toolkit, save for what is listed here with its reason.

sagemaker-training and sagemaker-tensorflow-training run each job for real; TensorFlow, which the latter imports and
does not use here, is stood in for by an empty module. So does keepstep with one host. With several, what a worker would
be started with is compared, since the toolkit starts its own without waiting for the others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keepstep.app.options import parse_train_options
from keepstep.app.setting_up import read_setup
from keepstep.core.launch import plan_worker
from keepstep.core.launch.table import RankTable
from tests.differential.jobs import Job, make_job

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TOOLKIT = Path(os.environ.get("KEEPSTEP_TOOLKIT_PYTHON", ROOT / ".venv-toolkit" / "bin" / "python"))
TRAIN = (
    "import sys, types; sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
    "from sagemaker_training.cli.train import main; main()"
)
SINGLE, SEVERAL = range(40), range(100, 130)

INTENDED = {
    "KEEPSTEP_*": "what keepstep tells its worker; the job's own settings of it",
    "PYTHONPATH": "the toolkit adds its own sys.path, and its packages with it; here the code folder and the guest "
    "come before what was there",
    "PYTHONUNBUFFERED": "else what a killed script has printed last is lost",
    "SAGEMAKER_REGION": "the toolkit leaves it empty where only AWS_REGION says it, or nothing",
    "S3_REGION": "the same; nor is the bucket asked for its region, for which few roles have the permission",
    "SAGEMAKER_JOB_NAME": "the toolkit leaves it empty for jobs that are not made by the SDK",
    "TF_CONFIG ports": "always 8890, which a restart may find taken; here ports walk with the generation",
    "TF_CONFIG ranks": "the toolkit has algo-10 before algo-2; here ranks are in the natural order of hosts",
    "TF_CONFIG of several": "without a distribution each host of the toolkit's trains for itself, here all together",
}
"""Where the two differ, and why; entrypoints/README.md has the same table."""

seen: Counter[str] = Counter()


def run_toolkit(job: Job, base: Path, told: Path) -> dict[str, Any]:
    environment = common(job, told) | {"SAGEMAKER_BASE_DIR": str(base)}
    done = subprocess.run(
        [TOOLKIT, "-c", TRAIN], env=environment, cwd=base, capture_output=True, timeout=60, check=False
    )
    assert told.exists(), done.stdout.decode() + done.stderr.decode()
    found: dict[str, Any] = json.loads(told.read_text())
    found["environment"].pop("SAGEMAKER_BASE_DIR")
    return found


def run_keepstep(job: Job, base: Path, told: Path) -> dict[str, Any]:
    environment = common(job, told)
    searched = [str(ROOT / "runtime"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(searched)
    settings = [f"launch.python={TOOLKIT}", "telemetry.listen=127.0.0.1:0"]
    words = ["--base-dir", str(base), "--scratch-dir", str(base / "scratch"), "--address", "127.0.0.1"]
    command = [sys.executable, "-P", "-m", "keepstep", "train", *words]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, env=environment, cwd=base, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and told.exists(), done.stdout.decode() + done.stderr.decode()
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def planned(job: Job, base: Path, told: Path) -> dict[str, str]:
    """The environment that a worker of a job of several hosts would be started with."""
    words = ["--base-dir", str(base), "--scratch-dir", str(base / "scratch"), "--set", f"launch.python={TOOLKIT}"]
    setup = read_setup(parse_train_options([*words, "--set", "coordination.tls=off"]), common(job, told), 0)
    trainers = setup.job.trainers
    addresses, rank = tuple(f"{host}:20001" for host in trainers), trainers.index(setup.job.host)
    table = RankTable(1, trainers, addresses, len(addresses))
    _, more = plan_worker(setup.job, table, rank, setup.policy)
    return setup.environment | dict(more)


def common(job: Job, told: Path) -> dict[str, str]:
    """What both are started with. The toolkit does not wait for names of hosts to be known, as there is no network."""
    own = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", "SM_STUDIO_LOCAL_MODE": "true"}
    return own | {"TOLD_TO": str(told), "TOLD_BY": str(TOOLKIT)} | job.environ


Pair = tuple[str | None, str | None]


def differing(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, Pair]:
    """What differs in two environments beyond what is meant to, which is counted."""
    found: dict[str, Pair] = {}
    for name in sorted(theirs.keys() | ours.keys()):
        pair = theirs.get(name), ours.get(name)
        if pair[0] == pair[1]:
            continue
        if name == "TF_CONFIG":
            found |= differing_tf_config(*pair)
        elif name == "SM_TRAINING_ENV":
            found |= differing_training_env(*pair)
        elif name in ("SAGEMAKER_REGION", "S3_REGION", "SAGEMAKER_JOB_NAME") and not pair[0]:
            seen[name] += 1
        elif name.startswith("KEEPSTEP_") and pair[0] is None:
            seen["KEEPSTEP_*"] += 1
        elif name in ("PYTHONPATH", "PYTHONUNBUFFERED"):
            seen[name] += 1
        else:
            found[name] = pair
    return found


def differing_tf_config(theirs: str | None, ours: str | None) -> dict[str, Pair]:
    """Equal members, under whatever ports and in whatever order, and the same one of them."""
    if theirs is None and ours is not None and len(json.loads(ours)["cluster"]["worker"]) > 1:
        seen["TF_CONFIG of several"] += 1
        return {}
    if theirs is None or ours is None:
        return {"TF_CONFIG": (theirs, ours)}
    worlds = [json.loads(re.sub(r":\d+\"", '"', each)) for each in (theirs, ours)]
    members = [world["cluster"].pop("worker") for world in worlds]
    ranks = [world["task"].pop("index") for world in worlds]
    seen["TF_CONFIG ports"] += 1
    seen["TF_CONFIG ranks"] += members[0] != members[1]
    same = worlds[0] == worlds[1] and sorted(members[0]) == sorted(members[1])
    return {} if same and members[0][ranks[0]] == members[1][ranks[1]] else {"TF_CONFIG": (theirs, ours)}


def differing_training_env(theirs: str | None, ours: str | None) -> dict[str, Pair]:
    one, other = (json.loads(each or "{}") for each in (theirs, ours))
    names = [name for name in sorted(one.keys() | other.keys()) if one.get(name, ...) != other.get(name, ...)]
    return {f"SM_TRAINING_ENV {name}": (repr(one.get(name)), repr(other.get(name))) for name in names}


@pytest.mark.parametrize("seed", SINGLE)
def test_a_script_on_one_host_sees_the_same(tmp_path, seed):
    job = make_job(seed)
    both = []
    for run in (run_toolkit, run_keepstep):
        base = tmp_path / "ml"
        job.write(base)
        both.append(run(job, base, tmp_path / "told.json"))
        (tmp_path / "told.json").unlink()
        base.rename(tmp_path / run.__name__)
    theirs, ours = both
    if "TF_CONFIG" in ours["environment"]:  # this test has it listen where there is a network
        here = ours["environment"]["TF_CONFIG"].replace("127.0.0.1:", f"{job.resources['current_host']}:")
        ours["environment"]["TF_CONFIG"] = here
    assert differing(theirs.pop("environment"), ours.pop("environment")) == {}
    assert ours == theirs


@pytest.mark.parametrize("seed", SEVERAL)
def test_a_script_on_several_hosts_sees_the_same(tmp_path, seed):
    job = make_job(seed, hosts=2 + seed % 11)
    base, told = tmp_path / "ml", tmp_path / "told.json"
    job.write(base)
    theirs = run_toolkit(job, base, told)
    assert differing(theirs["environment"], planned(job, base, told)) == {}


def test_each_intended_difference_is_one():
    """Run after the others, on one process: a reason for nothing is not kept."""
    if not seen:
        pytest.skip("the comparisons ran in other processes")
    for name, reason in INTENDED.items():
        print(f"{seen[name]:4} x {name}: {reason}")
    assert sorted(INTENDED) == sorted(+seen)
