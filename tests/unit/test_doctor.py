"""What `keepstep doctor` finds, and what it says to do about it. Programs that it asks are stood in for by scripts."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from keepstep.app.checkup import Subject, examine
from keepstep.app.cli import main
from keepstep.app.measuring import Finding
from keepstep.intake.contract import ContractOptions, load_contract
from keepstep.intake.policy import load_policy
from keepstep.ports import GpuSample
from tests.unit.intake.opt_ml import make_opt_ml

MODERN = {"python": "3.12.4", "executable": "/py", "tensorflow": "2.21.0", "keras": "3.15.1", "tf_keras": None,
          "horovod": None, "smdistributed": None}  # fmt: skip
FREE = "telemetry.listen=127.0.0.1:0"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def program(folder: Path, name: str, says: str, code: int = 0) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def found(
    tmp_path: Path, programs: Path, hosts: list[str], *knobs: str, store: Path | str | None = None, **python: object
) -> dict[str, list[Finding]]:
    """All findings by check, with an interpreter that says what `python` changes."""
    asked = program(programs, "python", json.dumps(MODERN | python))
    base = make_opt_ml(tmp_path / "ml", {"current_host": hosts[0], "hosts": hosts})
    contract = load_contract(base, {"TRAINING_JOB_NAME": "job"}, ContractOptions())
    policy = load_policy("default", (f"launch.python={asked}", *knobs))
    named = None if store is None else str(store)
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    seen = [GpuSample(f"GPU-{number}", number) for number in range(2)]
    subject = Subject(
        contract, policy, named, environment, tmp_path, 29_500, tmp_path / "dev", lambda: seen, speed=False
    )  # fmt: skip
    by_check: dict[str, list[Finding]] = {}
    for finding in examine(subject):
        by_check.setdefault(finding.check, []).append(finding)
    return by_check


def test_a_sound_host(tmp_path, programs):
    everything = found(tmp_path, programs, ["localhost"], FREE, store=tmp_path / "store")
    assert {finding.level for findings in everything.values() for finding in findings} == {"ok"}
    assert set(everything) == {
        "process", "hosts", "memory", "disk", "ports", "etcd", "GPU", "Python", "TensorFlow", "Keras", "launch",
        "store",
    }  # fmt: skip
    left = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [name for name in left if not name.startswith(".")] == []


@pytest.mark.parametrize(
    ("changes", "check", "level", "says"),
    [
        ({"python": "3.8.10"}, "Python", "bad", "3.8.10"),
        ({"tensorflow": None}, "TensorFlow", "warn", "not installed"),
        ({"tensorflow": "2.9.1"}, "TensorFlow", "warn", "2.9.1"),
        ({"tensorflow": "2.15.1", "keras": "2.15.0"}, "TensorFlow", "warn", "2.15.1"),
        ({"tf_keras": "2.21.0"}, "Keras", "ok", "3.15.1, tf_keras 2.21.0"),
    ],
)
def test_what_the_interpreter_has(tmp_path, programs, changes, check, level, says):
    (finding,) = found(tmp_path, programs, ["localhost"], FREE, **changes)[check]
    assert (finding.level, says in finding.found, bool(finding.fix)) == (level, True, level != "ok")


def test_an_interpreter_that_does_not_run(tmp_path, programs):
    broken = program(programs, "broken", "", code=3)
    (finding,) = found(tmp_path, programs, ["localhost"], FREE, f"launch.python={broken}")["Python"]
    assert (finding.level, finding.fix) == ("bad", "see to the interpreter, or name another by launch.python")
    (finding,) = found(tmp_path / "x", programs, ["localhost"], FREE, "launch.python=/none/python")["Python"]
    assert (finding.level, finding.fix) == ("bad", "name the script's interpreter by launch.python")


@pytest.mark.parametrize("python", ["/bin/true", "/bin/echo"])
def test_an_interpreter_that_is_none(tmp_path, programs, python):
    (finding,) = found(tmp_path, programs, ["localhost"], FREE, f"launch.python={python}")["Python"]
    assert (finding.level, finding.found) == ("bad", f"{python} is no Python")


def test_a_name_that_no_host_can_have_stops_no_other_check(tmp_path, programs):
    everything = found(tmp_path, programs, ["a..b", "localhost"], FREE, store=tmp_path / "store")
    assert [finding.level for finding in everything["hosts"]] == ["bad"]
    assert "store" in everything


@pytest.mark.parametrize(
    ("says", "level", "text"),
    [
        ("etcd Version: 3.4.23", "ok", "bin/etcd"),
        ("etcd Version: 3.3.25", "bad", "3.3.25"),
        ("nothing of the kind", "bad", "nothing of the kind"),
    ],
)
def test_etcd_for_several_hosts(tmp_path, programs, says, level, text):
    program(programs, "etcd", says)
    everything = found(tmp_path, programs, ["localhost", "localhost.localdomain"], FREE, "coordination.port=29100")
    (finding,) = everything["etcd"]
    assert (finding.level, text in finding.found, bool(finding.fix)) == (level, True, level != "ok")
    assert "repairs" in everything["Keras"][0].found
    assert (everything["hosts"][-1].level, "coordination.tls=off" in everything["hosts"][-1].fix) == ("bad", True)


def test_what_is_launched_and_who_takes_which_part(tmp_path, programs):
    hosts = ["localhost", "localhost.localdomain"]
    (finding,) = found(tmp_path, programs, hosts, FREE)["launch"]
    assert (finding.level, finding.found, finding.fix) == ("ok", "multi_worker; hosts that train 2", "")


def test_which_hosts_train_feed_and_idle(tmp_path, programs):
    groups = {"gpu": ["algo-1"], "cpu": ["algo-2"], "more": ["algo-3", "algo-4"]}
    described = [
        {"instance_group_name": name, "instance_type": "local", "hosts": each} for name, each in groups.items()
    ]
    resources = {
        "current_host": "algo-1",
        "hosts": [host for each in groups.values() for host in each],
        "instance_groups": described,
    }
    given = {"sagemaker_program": "train.py", "sagemaker_distribution_instance_groups": '["gpu"]'}
    contract = load_contract(make_opt_ml(tmp_path / "ml", resources, given), {}, ContractOptions())
    policy = load_policy("default", ("launch.data_service=cpu", "launch.python=/none", FREE))
    environment = {"PATH": str(programs)}
    subject = Subject(contract, policy, None, environment, tmp_path, 29_500, devices=tmp_path / "dev")
    (finding,) = (finding for finding in examine(subject) if finding.check == "launch")
    assert (finding.level, finding.found) == ("ok", "plain; hosts that train 1, feed 1, idle 2")


@pytest.mark.parametrize(
    ("strategy", "store", "says", "wants"),
    [
        ("mirrored", None, "launch.strategy: found mirrored with 2 hosts", "multi_worker, "),
        ("multi_worker launch.ranks=2", None, "launch.ranks: found 2 with multi_worker", "0, or launch.strategy"),
        ("horovod", None, "launch.strategy: found horovod on several hosts without", "a store that all hosts"),
        ("horovod", "store", "launch.strategy: {programs}/mpirun is HYDRA", "Open MPI 4"),
    ],
)  # fmt: skip
def test_a_strategy_that_can_not_be_launched(tmp_path, programs, strategy, store, says, wants):
    program(programs, "mpirun", "HYDRA build details:")
    hosts, named = ["localhost", "localhost.localdomain"], store and tmp_path / store
    (finding,) = found(tmp_path, programs, hosts, FREE, *f"launch.strategy={strategy}".split(), store=named)["launch"]
    assert finding.level == "bad"
    assert finding.found.startswith(says.format(programs=programs))
    assert finding.fix.startswith(wants)


def test_a_host_that_no_name_is_known_of(tmp_path, programs):
    hosts = found(tmp_path, programs, ["localhost", "none-such.invalid"], FREE, store=tmp_path / "store")["hosts"]
    assert [(finding.level, finding.found.partition(":")[0]) for finding in hosts if finding.level != "ok"] == [
        ("warn", "none-such.invalid")
    ]


def test_ports_that_are_taken(tmp_path, programs):
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (finding,) = found(tmp_path, programs, ["localhost"], f"telemetry.listen=127.0.0.1:{port}")["ports"]
    assert (finding.level, finding.found) == ("bad", f"taken: {port}")


@pytest.mark.parametrize("store", ["file", "none"])
def test_a_store_that_can_not_be_written(tmp_path, programs, store):
    (tmp_path / "file").write_text("")
    named = tmp_path / "file" / "store" if store == "file" else None
    (finding,) = found(tmp_path, programs, ["localhost"], FREE, store=named)["store"]
    assert finding.level == ("bad" if store == "file" else "warn")
    assert finding.fix


@pytest.mark.parametrize(
    ("says", "code", "levels"),
    [
        ("NVIDIA H200, 570.1, 0\nNVIDIA H200, 570.1, [N/A]", 0, ["ok", "ok"]),
        ("NVIDIA H200, 570.1, 0\nNVIDIA H200, 570.1, 3", 0, ["ok", "bad"]),
        ("", 9, ["bad"]),
    ],
)
def test_gpus_as_the_driver_sees_them(tmp_path, programs, says, code, levels):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    program(programs, "nvidia-smi", says, code)
    gpus = found(tmp_path, programs, ["localhost"], FREE)["GPU"]
    assert [finding.level for finding in gpus if "," in finding.found or finding.level == "bad"] == levels


def test_the_worst_stands_first_and_decides_the_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    words = ["doctor", "--base-dir", str(tmp_path / "none"), "--set", FREE, "--set", "launch.python=/none", "train.py"]
    assert main([*words, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["level"] for finding in findings][:2] == ["bad", "warn"]
    assert main(words) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["check", "found", "what", "to", "do"]
    assert shown[1].startswith("bad   Python")


def test_what_the_platform_says_wrong_is_the_finding(tmp_path, capsys):
    base = make_opt_ml(tmp_path, {"hosts": []})
    assert main(["doctor", "--base-dir", str(base)]) == 1
    assert "resourceconfig.json" in capsys.readouterr().out
