"""What the platform says, as values."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.intake.contract import (
    ContractOptions,
    choose_strategy,
    count_gpus,
    find_code,
    load_contract,
    read_environment,
    read_mpi,
)
from keepstep.intake.contract.documents import parse_document
from keepstep.intake.contract.hyperparameters import decode, to_arguments
from keepstep.intake.contract.resources import parse_resources
from tests.unit.intake.opt_ml import HYPERPARAMETERS, RESOURCES, attempt, make_opt_ml

JOB = {"TRAINING_JOB_NAME": "digits-2026"}


def test_hosts_are_in_natural_order(tmp_path):
    contract = load_contract(make_opt_ml(tmp_path), JOB)
    assert contract.hosts == ("algo-1", "algo-2", "algo-10")
    assert (contract.current_host, contract.is_chief) == ("algo-1", True)
    assert contract.resource_config["hosts"] == ["algo-1", "algo-10", "algo-2"]
    assert contract.network_interface_name == "eth0"
    assert contract.job_name == "digits-2026"


def test_local_mode_says_less(tmp_path):
    few = {"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]}
    contract = load_contract(make_opt_ml(tmp_path, few), {})
    assert contract.hosts == ("algo-1", "algo-2")
    assert (contract.network_interface_name, contract.job_name) == ("eth0", "local")


def test_the_script_of_the_hyperparameters_gets_them_as_arguments(tmp_path):
    given_ = {**HYPERPARAMETERS, "lr": "1e-3", "x": "a b $HOME", "keepstep_store": "/data", "sagemaker_region": '"eu"'}
    contract = load_contract(make_opt_ml(tmp_path, hyperparameters=given_), JOB)
    assert contract.script == tmp_path / "code" / "train.py"
    assert contract.code_dir == tmp_path / "code"
    assert contract.arguments == ("--epochs", "3", "--lr", "0.001", "-x", "a b $HOME")
    assert contract.store == "/data"


def test_the_script_may_come_through_a_channel(tmp_path):
    base = make_opt_ml(tmp_path, channels={"code": {}, "train": {}}, code="input/data/code")
    contract = load_contract(base, JOB)
    assert contract.script == tmp_path / "input" / "data" / "code" / "train.py"
    assert contract.channels == {name: tmp_path / "input" / "data" / name for name in ("code", "train")}


@pytest.mark.parametrize(
    ("name", "setup", "kind", "program"),
    [
        ("train.py", False, "script", "train.py"),
        ("sub/train.py", False, "script", "sub/train.py"),
        ("run.sh", False, "command", "run.sh"),
        ("train", False, "command", "train"),
        ("train.py", True, "module", "train"),
        ("package.main", True, "module", "package.main"),
        ("run.sh", True, "command", "run.sh"),
    ],
)
def test_what_kind_of_thing_is_run_is_told_as_the_toolkit_does(tmp_path, name, setup, kind, program):
    base = make_opt_ml(tmp_path, hyperparameters={"sagemaker_program": name})
    (base / "code" / "sub").mkdir()
    for each in (name, *(["setup.py"] if setup else [])):
        (base / "code" / each).write_text("")
    contract = load_contract(base, JOB)
    assert (contract.kind, contract.program, contract.is_submitted) == (kind, program, True)
    assert (contract.entry, contract.code_dir) == (name, base / "code")


@pytest.mark.parametrize(
    ("name", "mode", "kind"), [("a.sh", 0o644, "command"), ("a", 0o755, "command"), ("a", 0o644, "script")]
)
def test_a_program_of_the_command_line(tmp_path, monkeypatch, name, mode, kind):
    (tmp_path / name).write_text("true\n")
    (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    contract = load_contract(tmp_path / "nothing", {}, ContractOptions(name, ("--fast",)))
    assert (contract.kind, contract.program, contract.is_submitted) == (kind, name, False)


def test_where_code_comes_from(tmp_path):
    archive = tmp_path / "elsewhere.tar.gz"
    archive.touch()
    base = make_opt_ml(tmp_path / "ml", hyperparameters={"sagemaker_submit_directory": str(archive)})
    source = find_code(base, {})
    assert source is not None
    assert (source.source, source.into, source.region) == (str(archive), base / "code", None)


@pytest.mark.parametrize("said", [None, "", "CODE"])
def test_code_that_lies_where_it_belongs_is_not_got(tmp_path, said):
    given_ = {} if said is None else {"sagemaker_submit_directory": said.replace("CODE", str(tmp_path / "code"))}
    assert find_code(make_opt_ml(tmp_path, hyperparameters=given_), {}) is None


@pytest.mark.parametrize(("environ", "region"), [({}, "eu-west-1"), ({"AWS_REGION": "us-east-2"}, "us-east-2")])
def test_code_in_s3_has_a_region(tmp_path, environ, region):
    given_ = {"sagemaker_submit_directory": '"s3://b/k.tar.gz"', "sagemaker_region": '"eu-west-1"'}
    source = find_code(make_opt_ml(tmp_path, hyperparameters=given_), environ)
    assert source is not None
    assert (source.source, source.region, source.endpoint) == ("s3://b/k.tar.gz", region, None)


def test_a_name_that_no_file_can_have_is_no_policy_s(tmp_path):
    base = make_opt_ml(tmp_path, hyperparameters={**HYPERPARAMETERS, "keepstep_policy": "p" * 300 + ".yaml"})
    assert load_contract(base, JOB).policy_source == "p" * 300 + ".yaml"


@pytest.mark.parametrize("said", ["7", "gs://b/k", "/none/there.tar.gz", "true", "/x/" + "y" * 300])
def test_code_that_can_come_from_nowhere(tmp_path, said):
    base = make_opt_ml(tmp_path, hyperparameters={"sagemaker_submit_directory": said})
    with pytest.raises(ConfigError, match=r"hyperparameters\.json: sagemaker_submit_directory: .*wanted"):
        find_code(base, {})


def test_the_command_line_goes_before_the_hyperparameters(tmp_path, monkeypatch):
    base = make_opt_ml(tmp_path / "ml")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    contract = load_contract(base, JOB, ContractOptions("mine.py", ("--fast",), "spot", "s3://bucket/x"))
    assert (contract.script, contract.arguments) == (tmp_path / "mine.py", ("--fast",))
    assert (contract.code_dir, contract.entry) == (tmp_path, "mine.py")
    assert (contract.policy_source, contract.store) == ("spot", "s3://bucket/x")


def test_a_script_that_is_not_here_is_looked_for_where_the_platform_puts_code(tmp_path, monkeypatch):
    base = make_opt_ml(tmp_path / "ml")
    monkeypatch.chdir(tmp_path)
    contract = load_contract(base, JOB, ContractOptions("train.py"))
    assert (contract.script, contract.code_dir) == (base / "code" / "train.py", base / "code")


def test_a_laptop_needs_no_platform(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    contract = load_contract(tmp_path / "nothing", {}, ContractOptions("mine.py"))
    assert (contract.hosts, contract.current_host, contract.job_name) == (("localhost",), "localhost", "local")


@pytest.mark.parametrize("environ", [JOB, {}], ids=["job", "config folder"])
def test_a_missing_resource_file_never_makes_many_jobs_of_one(tmp_path, environ):
    base = make_opt_ml(tmp_path, resources=None) if not environ else tmp_path / "nothing"
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(ConfigError, match=r"resourceconfig\.json: the file is missing"):
        load_contract(base, environ, ContractOptions(str(tmp_path / "mine.py")))


@pytest.mark.parametrize(
    ("variable", "parameter", "attribute"),
    [
        ("KEEPSTEP_POLICY", "keepstep_policy", "policy_source"),
        ("KEEPSTEP_STORE", "keepstep_store", "store"),
        ("KEEPSTEP_JOB_NAME", "keepstep_job_name", "job_name"),
    ],
)
def test_the_environment_goes_before_the_hyperparameters(tmp_path, variable, parameter, attribute):
    base = make_opt_ml(tmp_path, hyperparameters={**HYPERPARAMETERS, parameter: "theirs"})
    assert getattr(load_contract(base, JOB), attribute) == "theirs"
    assert getattr(load_contract(base, {**JOB, variable: "mine"}), attribute) == "mine"


def test_a_policy_may_lie_beside_the_script(tmp_path):
    base = make_opt_ml(tmp_path, hyperparameters={**HYPERPARAMETERS, "keepstep_policy": "mine.yaml"})
    (base / "code" / "mine.yaml").write_text("version: 1\n")
    assert load_contract(base, JOB).policy_source == str(base / "code" / "mine.yaml")


def test_sagemaker_program_may_be_a_variable(tmp_path):
    base = make_opt_ml(tmp_path, hyperparameters={"epochs": "3"})
    contract = load_contract(base, {**JOB, "SAGEMAKER_PROGRAM": "train.py"})
    assert (contract.entry, contract.arguments) == ("train.py", ("--epochs", "3"))


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ('"train.py"', "train.py"),
        ("train.py", "train.py"),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("", ""),
        ("007", "007"),
        ('{"a": [1]}', {"a": [1]}),
        ("[" * 20_000, "[" * 20_000),
        ("9" * 5000, "9" * 5000),
        (7, 7),
    ],
)
def test_values_are_json_or_the_string_they_are(raw, value):
    assert decode(raw) == value


def test_arguments_are_as_the_toolkit_makes_them():
    given_ = {
        "b": 2,
        "a-name": "it's",
        "flag": True,
        "none": None,
        "list": [1, "x"],
        "map": {"k2": 2, "k1": [1]},
        "empty": "",
    }
    assert to_arguments(given_) == (
        *("--a-name", "it's", "-b", "2", "--empty", "", "--flag", "True"),
        *("--list", "[1, 'x']", "--map", "k1=[1],k2=2", "--none", ""),
    )


@given(st.text(max_size=200))
def test_any_document_is_an_object_or_an_error(text):
    document, error = attempt(lambda: parse_document(text, "f.json"))
    assert error.startswith("f.json") if document is None else document.values == json.loads(text)


_GROUP = st.fixed_dictionaries(
    {},
    optional={
        "instance_group_name": st.sampled_from(["g", "", 5, None]),
        "hosts": st.sampled_from([["algo-1"], ["algo-9"], [["algo-1"]], [], "algo-1", None]),
    },
)
_JSON = st.sampled_from([None, True, 0, 1.5, "", "x", "a/b", [], [1], [[]], {}, {"instance_group_name": "g"}])


@settings(max_examples=60)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "hosts": st.lists(st.sampled_from(["algo-1", "algo-2", "algo-10", "", "a/b"]), max_size=4) | _JSON,
            "current_host": st.sampled_from(["algo-1", "algo-2"]) | _JSON,
            "network_interface_name": _JSON,
            "instance_groups": _JSON | st.lists(_GROUP, max_size=2),
        },
    )
)
def test_any_resource_file_names_this_host_among_distinct_ones_or_is_an_error(values):
    resources, error = attempt(lambda: parse_resources(parse_document(json.dumps(values), "f.json")))
    if resources is None:
        assert error.startswith("f.json") and "; wanted " in error
    else:
        assert resources.current_host in resources.hosts
        assert len(set(resources.hosts)) == len(resources.hosts)


def contract_for(tmp_path: Path, hosts: list[str], **hyperparameters: str):
    resources = {"current_host": hosts[0], "hosts": hosts}
    return load_contract(make_opt_ml(tmp_path, resources, {**HYPERPARAMETERS, **hyperparameters}), JOB)


def test_auto_follows_hosts_and_gpus(tmp_path):
    one = contract_for(tmp_path / "one", ["algo-1"])
    two = contract_for(tmp_path / "two", ["algo-1", "algo-2"])
    assert [choose_strategy(one, "auto", gpus) for gpus in (0, 1, 8)] == ["plain", "plain", "mirrored"]
    assert choose_strategy(two, "auto", 8) == "multi_worker"
    assert choose_strategy(one, "multi_worker", 0) == "multi_worker"


def test_auto_follows_the_platforms_switch(tmp_path):
    switched = contract_for(tmp_path, ["algo-1"], sagemaker_multi_worker_mirrored_strategy_enabled="true")
    assert choose_strategy(switched, "auto", 1) == "multi_worker"
    assert choose_strategy(switched, "plain", 1) == "plain"


def test_parameter_servers_are_for_several_hosts(tmp_path):
    asked = contract_for(tmp_path / "two", ["algo-1", "algo-2"], sagemaker_parameter_server_enabled="true")
    assert choose_strategy(asked, "auto", 1) == "parameter_server_v1"
    assert choose_strategy(asked, "parameter_server", 1) == "parameter_server"
    assert choose_strategy(asked, "multi_worker", 1) == "multi_worker"
    alone = contract_for(tmp_path / "one", ["algo-1"], sagemaker_parameter_server_enabled="true")
    assert choose_strategy(alone, "auto", 1) == "plain"
    with pytest.raises(ConfigError, match=r"launch\.strategy: found parameter_server with one host"):
        choose_strategy(alone, "parameter_server", 1)


def test_the_platforms_switches_for_mpi_are_followed_unless_the_policy_overrides_them(tmp_path):
    asked = contract_for(tmp_path / "mpi", ["algo-1", "algo-2"], sagemaker_mpi_enabled="true")
    assert choose_strategy(asked, "auto", 1) == "horovod"
    assert choose_strategy(asked, "multi_worker", 1) == "multi_worker"
    given = {"sagemaker_distributed_dataparallel_enabled": "true"}
    assert choose_strategy(contract_for(tmp_path / "smddp", ["algo-1"], **given), "auto", 8) == "smddp"


def test_mpirun_gets_a_rank_for_each_gpu_unless_somebody_says_otherwise(tmp_path):
    plain = contract_for(tmp_path / "plain", ["algo-1", "algo-2"])
    assert [read_mpi(plain, "horovod", 0, gpus, 2, False).processes for gpus in (0, 1, 8)] == [1, 1, 8]
    assert read_mpi(plain, "multi_worker", 0, 8, 2, False) is None
    given = {
        "sagemaker_mpi_num_of_processes_per_host": "4",
        "sagemaker_mpi_num_processes": "6",
        "sagemaker_mpi_custom_mpi_options": "-x A=b --NCCL_DEBUG WARN -verbose",
        "sagemaker_distributed_dataparallel_custom_mpi_options": "-x C=d --NCCL_DEBUG=TRACE",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }
    asked = contract_for(tmp_path / "asked", ["algo-1", "algo-2"], **given)
    horovod, smddp = (read_mpi(asked, strategy, 0, 8, 2, True) for strategy in ("horovod", "smddp"))
    assert (horovod.processes, horovod.total) == (4, 6)
    assert (horovod.options, horovod.nccl_debug) == (("-x", "A=b", "-verbose"), "WARN")
    assert (horovod.instance_type, smddp.instance_type) == ("local", "ml.p4d.24xlarge")
    assert (smddp.options, smddp.nccl_debug, smddp.total) == (("-x", "C=d"), "TRACE", 0)
    by_policy = read_mpi(asked, "horovod", 2, 8, 2, False)
    assert (by_policy.processes, by_policy.total) == (2, 0)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("sagemaker_mpi_num_of_processes_per_host", "0", "found 0"),
        ("sagemaker_mpi_num_of_processes_per_host", "-1", "found -1"),
        ("sagemaker_mpi_num_of_processes_per_host", "true", "found true"),
        ("sagemaker_mpi_num_of_processes_per_host", "2.5", "found 2.5"),
        ("sagemaker_mpi_num_of_processes_per_host", "eight", 'found "eight"'),
        ("sagemaker_mpi_num_processes", "100000", "found 100000"),
        ("sagemaker_mpi_num_processes", "2", "found 2; wanted 1 to 1: 1 hosts of 1, none without a rank"),
        ("sagemaker_mpi_custom_mpi_options", '["-x"]', "found"),
        ("sagemaker_mpi_custom_mpi_options", "-x A --NCCL_DEBUG", "a level behind --NCCL_DEBUG"),
    ],
)
def test_what_mpirun_can_not_be_told_is_refused(tmp_path, key, value, found):
    asked = contract_for(tmp_path, ["algo-1"], **{key: value})
    with pytest.raises(ConfigError, match=re.escape(found)) as caught:
        read_mpi(asked, "horovod", 0, 1, 1, False)
    assert "hyperparameters.json" in str(caught.value.describe())
    assert key in caught.value.describe()


def test_one_host_strategies_refuse_several(tmp_path):
    with pytest.raises(ConfigError, match=r"launch\.strategy: found mirrored with 2 hosts"):
        choose_strategy(contract_for(tmp_path, ["algo-1", "algo-2"]), "mirrored", 1)


def test_gpus_are_counted_by_their_devices(tmp_path):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert (count_gpus(tmp_path), count_gpus(tmp_path / "none")) == (2, 0)


def test_the_environment_is_a_copy(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_TEST_MARK", "here")
    environ = read_environment()
    environ["KEEPSTEP_TEST_MARK"] = "changed"
    assert os.environ["KEEPSTEP_TEST_MARK"] == "here"


def test_the_fixture_is_what_the_platform_writes(tmp_path):
    written = json.loads((make_opt_ml(tmp_path) / "input" / "config" / "resourceconfig.json").read_text())
    assert written == RESOURCES


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """A folder, and for root the rights of an ordinary user: root may read everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("code/train.py", "train.py: Permission denied"),
        ("code", "code/train.py: Permission denied"),
        ("input/config/resourceconfig.json", "it can not be read: Permission denied"),
        ("input/config", "it can not be read: Permission denied"),
    ],
)
def test_what_may_not_be_read_is_said(ordinary_user, file, said):
    base = make_opt_ml(ordinary_user / "ml")
    (base / file).chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    with pytest.raises(ConfigError) as caught:
        load_contract(base, JOB)
    if os.getuid() == 0:
        os.seteuid(0)
    (base / file).chmod(0o700)
    assert said in str(caught.value)
