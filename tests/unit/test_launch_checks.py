"""What mpirun's strategies want to be there, and what is said where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.app.launch_checks import check_launcher
from keepstep.app.setting_up import check_use
from keepstep.core.job import JobSpec, MpiSpec
from keepstep.errors import ConfigError
from keepstep.intake.policy import load_policy
from tests.unit.core.values import a_job

OPEN_MPI = "mpirun (Open MPI) 4.1.4"
HAS_ALL = {"tensorflow": "2.11.1", "horovod.tensorflow": True, "smdistributed.dataparallel.tensorflow": True}


def job_of(strategy: str = "horovod", python: str = "python3", hosts: int = 2) -> JobSpec:
    names = tuple(f"algo-{number}" for number in range(1, hosts + 1))
    return a_job(strategy=strategy, python=python, hosts=names, mpi=MpiSpec(1, "eth0", "local"))


class Image:
    """What the user's image has: an mpirun that says its version, an interpreter that says what it finds."""

    def __init__(self, folder: Path, mpirun: str | None = OPEN_MPI, has: dict[str, object] | None = None) -> None:
        self.folder = folder
        if mpirun is not None:
            self._write("mpirun", f"echo '{mpirun}'")
        self._write("python3", f"echo '{json.dumps(HAS_ALL | (has or {}))}'")

    def _write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def check(self, job: JobSpec, has_trust: bool = True) -> None:
        job = a_job(
            **{name: getattr(job, name) for name in ("strategy", "hosts", "mpi")}, python=str(self.folder / "python3")
        )
        check_launcher(job, {"PATH": str(self.folder)}, has_trust, self.folder)


@pytest.mark.parametrize("strategy", ["horovod", "smddp"])
def test_an_image_that_has_all_of_it_is_well(tmp_path: Path, strategy: str) -> None:
    Image(tmp_path).check(job_of(strategy))
    Image(tmp_path).check(job_of(strategy, hosts=1), has_trust=False)


def test_other_strategies_want_nothing(tmp_path: Path) -> None:
    check_launcher(a_job(), {"PATH": str(tmp_path)}, False, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "mpirun", "has", "said"),
    [
        ("horovod", None, {}, "found horovod, and no mpirun on PATH; wanted an image with Open MPI 4"),
        ("horovod", "mpirun (Open MPI) 5.0.3", {}, "is mpirun (Open MPI) 5.0.3; wanted Open MPI 4"),
        ("horovod", "HYDRA build details:", {}, "is HYDRA build details:; wanted Open MPI 4"),
        ("horovod", OPEN_MPI, {"horovod.tensorflow": False}, "has no horovod.tensorflow; wanted an image with Horovod"),
        (
            "smddp",
            OPEN_MPI,
            {"tensorflow": "2.12.0"},
            "TensorFlow 2.12.0: SageMaker's data parallel library ended at 2.11",
        ),
        (
            "smddp",
            OPEN_MPI,
            {"tensorflow": "3.0"},
            "wanted launch.strategy=multi_worker with MultiWorkerMirroredStrategy",
        ),
        (
            "smddp",
            OPEN_MPI,
            {"smdistributed.dataparallel.tensorflow": False},
            "smdistributed.dataparallel.tensorflow is not installed; wanted one of AWS's images up to TensorFlow 2.11",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_begins(
    tmp_path: Path, strategy: str, mpirun: str | None, has: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Image(tmp_path, mpirun, has).check(job_of(strategy))
    assert said in caught.value.describe()
    assert caught.value.describe().startswith("launch.strategy")


@pytest.mark.parametrize(
    ("said", "strategy", "text"),
    [
        ("launch.evaluator=on", "multi_worker", "launch.evaluator: found on with multi_worker; wanted off, or"),
        ("launch.evaluator=on", "horovod", "launch.evaluator: found on with horovod"),
        (
            "launch.ranks=2",
            "mirrored",
            "launch.ranks: found 2 with mirrored; wanted 0, or launch.strategy one of horovod",
        ),
    ],
)
def test_what_is_said_of_another_strategy_is_refused(said: str, strategy: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_use(load_policy("default", [said]), strategy)
    assert text in caught.value.describe()
    check_use(load_policy("default", []), strategy)


def test_hosts_that_can_not_prove_themselves_run_no_commands_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without certificates of their own.*coordination\.tls=on"):
        Image(tmp_path).check(job_of(), has_trust=False)


def test_an_interpreter_that_does_not_answer_is_named(tmp_path: Path) -> None:
    image = Image(tmp_path)
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match=r"launch\.python: .*python3 does not answer"):
        image.check(job_of())
