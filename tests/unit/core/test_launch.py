"""What a worker is started with."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.job import PORT_SPAN, MpiSpec, port_from
from keepstep.core.launch import plan_feeder, plan_server, plan_worker, servers_of, stands_by, trains
from keepstep.core.launch.data_service import tasks_of
from keepstep.core.launch.multi_worker import tf_config
from keepstep.core.launch.table import RankTable
from keepstep.core.policy import Policy
from keepstep.intake.policy import load_policy
from tests.unit.core.values import a_job

ADDRESSES = ("10.0.0.1:20003", "10.0.0.2:20003")


def table(addresses, generation=3, full=0):
    hosts = tuple(f"algo-{number}" for number in range(1, len(addresses) + 1))
    return RankTable(generation, hosts, addresses, full or len(addresses))


@pytest.mark.parametrize("rank", [0, 1])
def test_tf_config_names_all_workers_in_rank_order_and_no_chief(rank):
    config = json.loads(tf_config(ADDRESSES, rank))
    assert config["cluster"] == {"worker": ["10.0.0.1:20003", "10.0.0.2:20003"]}
    assert config["task"] == {"type": "worker", "index": rank}


def test_tf_config_is_the_same_text_each_time():
    assert tf_config(ADDRESSES, 1) == (
        '{"cluster": {"worker": ["10.0.0.1:20003", "10.0.0.2:20003"]}, "environment": "cloud", '
        '"task": {"index": 1, "type": "worker"}}'
    )


def test_a_worker_runs_the_users_script_with_the_users_interpreter():
    command, environment = plan_worker(a_job(), table(ADDRESSES), 1, Policy())
    assert command == ("python3", "-m", "keepstep_worker", "train.py", "--epochs", "3")
    values = dict(environment)
    assert (values["KEEPSTEP_RANK"], values["KEEPSTEP_WORLD_SIZE"], values["KEEPSTEP_GENERATION"]) == ("1", "2", "3")
    assert json.loads(values["TF_CONFIG"])["task"]["index"] == 1


@pytest.mark.parametrize(
    ("said", "full", "batch"),
    [((), "3", "keep_global"), (("elastic.batch=keep_local",), "3", "keep_local"), ((), "2", "keep_global")],
)
def test_a_worker_is_told_the_whole_world_and_what_becomes_of_the_batch(said, full, batch):
    job = a_job(hosts=("algo-1", "algo-2", "algo-3"))
    policy = load_policy("default", said)
    values = dict(plan_worker(job, table(ADDRESSES, full=int(full)), 1, policy)[1])
    assert (values["KEEPSTEP_WORLD_SIZE"], values["KEEPSTEP_FULL_WORLD"]) == ("2", full)
    assert values["KEEPSTEP_BATCH"] == batch


@pytest.mark.parametrize("strategy", ["plain", "mirrored"])
def test_one_host_needs_no_tf_config(strategy):
    job = a_job(strategy=strategy, hosts=("algo-1",))
    assert "TF_CONFIG" not in dict(plan_worker(job, table(ADDRESSES[:1]), 0, Policy())[1])


def test_tensorflow_is_told_how_long_to_wait_for_its_peers():
    policy = load_policy("default", ["coordination.lease=3s", "hang.first_step=5min"])
    values = dict(plan_worker(a_job(), table(ADDRESSES), 1, policy)[1])
    assert (values["KEEPSTEP_HEARTBEAT_S"], values["KEEPSTEP_REGISTER_S"]) == ("6", "300")


THREE = ("10.0.0.1:20003", "10.0.0.2:20003", "10.0.0.3:20503")


def served(strategy="parameter_server", number=3):
    """Role and number of each process, and its TF_CONFIG, in the whole world."""
    job = a_job(strategy=strategy, hosts=("algo-1", "algo-2", "algo-3"))
    found = {"rank 0": json.loads(dict(plan_worker(job, table(THREE, number), 0, Policy())[1])["TF_CONFIG"])}
    for rank in range(3):
        for task in servers_of(job, rank):
            command, values = plan_server(job, table(THREE, number), task)
            alone = strategy == "parameter_server_v1" and task.role == "ps"
            assert (command[-1] == "--serve") == alone
            environment = dict(values)
            assert environment["KEEPSTEP_RANK"] == str(rank)
            assert (environment.get("CUDA_VISIBLE_DEVICES") == "-1") == (task.role == "ps")
            found[f"{task.role} {task.number}"] = json.loads(environment["TF_CONFIG"])
    return found


def test_each_host_has_a_parameter_server_the_first_the_chief_and_each_other_a_worker():
    found = served()
    assert set(found) == {"rank 0", "ps 0", "ps 1", "ps 2", "worker 0", "worker 1"}
    assert all(config["cluster"] == found["rank 0"]["cluster"] for config in found.values())
    assert found["rank 0"]["cluster"] == {
        "chief": ["10.0.0.1:20003"],
        "worker": ["10.0.0.2:20003", "10.0.0.3:20503"],
        "ps": ["10.0.0.1:20253", "10.0.0.2:20253", "10.0.0.3:20753"],
    }
    assert found.pop("rank 0")["task"] == {"type": "chief", "index": 0}
    assert {name: f"{each['task']['type']} {each['task']['index']}" for name, each in found.items()} == {
        name: name for name in found
    }


def test_in_tensorflow_1_the_chief_is_called_master():
    found = served("parameter_server_v1")["rank 0"]
    assert found["task"]["type"] == "master"
    assert "chief" not in found["cluster"]


def test_an_evaluator_runs_beside_the_chief_where_one_is_wanted():
    job = a_job(strategy="parameter_server", hosts=("algo-1", "algo-2", "algo-3"), evaluates=True)
    assert [task.role for task in servers_of(job, 0)] == ["ps", "evaluator"]
    assert [task.role for task in servers_of(job, 1)] == ["ps", "worker"]
    _, values = plan_server(job, table(THREE), servers_of(job, 0)[1])
    config = json.loads(dict(values)["TF_CONFIG"])
    assert config["task"] == {"type": "evaluator", "index": 0}
    assert set(config["cluster"]) == {"chief", "ps", "worker"}
    assert dict(values)["CUDA_VISIBLE_DEVICES"] == "-1"


def test_only_the_first_host_trains_with_parameter_servers():
    job = a_job(strategy="parameter_server")
    assert [trains(job, rank) for rank in (0, 1, 2)] == [True, False, False]
    assert all(trains(a_job(strategy="multi_worker"), rank) for rank in (0, 1, 2))
    assert servers_of(a_job(strategy="multi_worker"), 1) == ()


@given(st.integers(1, 10**6))
def test_a_host_has_two_ports_in_a_generation_and_none_of_its_neighbours(number):
    def ports(of):
        base = f"10.0.0.1:{port_from(20000, of)}"
        config = json.loads(
            dict(plan_worker(a_job(strategy="parameter_server"), table((base,), of), 0, Policy())[1])["TF_CONFIG"]
        )
        return {int(each.rpartition(":")[2]) for role in ("chief", "ps") for each in config["cluster"][role]}

    assert len(ports(number)) == 2
    assert ports(number) <= set(range(20000, 20000 + PORT_SPAN))
    assert ports(number) & ports(number + 1) == set()


@given(st.integers(1, 10**6))
def test_generations_that_overlap_in_time_share_no_port(number):
    ports = [port_from(a_job().port_base, number + later) for later in range(PORT_SPAN)]
    assert len(set(ports)) == PORT_SPAN
    assert all(20000 <= port < 20000 + PORT_SPAN for port in ports)


def launched(rank, strategy="horovod", addresses=ADDRESSES, **spec):
    """Command and environment of a host whose ranks mpirun starts."""
    mpi = MpiSpec(**{"processes": 2, "interface": "eth0", "instance_type": "ml.c5.xlarge"} | spec)
    job = a_job(strategy=strategy, host=f"algo-{rank + 1}", mpi=mpi)
    command, environment = plan_worker(job, table(addresses, full=3), rank, Policy())
    return list(command), dict(environment)


def test_the_first_host_runs_mpirun_for_the_ranks_of_all():
    command, environment = launched(0)
    assert command[:12] == [
        *("python3", "-m", "keepstep_worker", "--mpirun", "mpirun"),
        *("--host", "algo-1:2,algo-2:2", "-np", "4", "--allow-run-as-root", "--display-map", "--tag-output"),
    ]
    assert command[-7:] == ["python3", "-m", "keepstep_worker", "--rank", "train.py", "--epochs", "3"]
    assert environment["KEEPSTEP_PLACES"] == "algo-1=10.0.0.1:20003 algo-2=10.0.0.2:20003"
    assert environment["KEEPSTEP_FULL_WORLD"] == "6"
    assert "TF_CONFIG" not in environment


def test_each_other_host_waits_for_what_mpirun_wants_there():
    command, environment = launched(1)
    assert command == ["python3", "-m", "keepstep_worker", "--orted"]
    assert (environment["KEEPSTEP_LISTEN"], environment["KEEPSTEP_HOST"]) == ("10.0.0.2:20003", "algo-2")


@pytest.mark.parametrize(("total", "hosts", "count", "full"), [(0, 2, 4, 6), (3, 2, 3, 3), (3, 1, 2, 3), (5, 2, 4, 5)])
def test_no_world_has_more_ranks_than_it_has_room_for(total, hosts, count, full):
    command, environment = launched(0, addresses=ADDRESSES[:hosts], total=total)
    assert command[command.index("-np") + 1] == str(count)
    assert environment["KEEPSTEP_FULL_WORLD"] == str(full)


def test_a_smaller_world_has_fewer_ranks():
    command, _ = launched(0, addresses=ADDRESSES[:1])
    assert command[command.index("--host") + 1] == "algo-1:2"
    assert command[command.index("-np") + 1] == "2"


def test_the_data_parallel_library_is_started_by_its_own_program_where_that_is_there():
    assert "smddprun" not in launched(0, "smddp")[0]
    command, _ = launched(0, "smddp", has_smddprun=True)
    assert command[command.index("smddprun") + 1 :][:4] == ["python3", "-m", "keepstep_worker", "--rank"]
    assert "SMDATAPARALLEL_SERVER_ADDR=algo-1" in command


def test_no_standby_becomes_a_rank():
    assert stands_by(a_job())
    assert not stands_by(a_job(strategy="horovod"))
    assert not stands_by(a_job(kind="command"))


def test_workers_are_told_where_their_data_come_from_and_feeders_where_they_listen():
    world = RankTable(3, ("algo-1",), ADDRESSES[:1], 1, "run1", ("10.0.0.8:20003", "10.0.0.9:20003"))
    environment = dict(plan_worker(a_job(), world, 0, Policy())[1])
    assert environment["KEEPSTEP_DATA_SERVICE"] == "grpc://10.0.0.8:20003"
    assert "KEEPSTEP_DATA_SERVICE" not in dict(plan_worker(a_job(), table(ADDRESSES), 0, Policy())[1])
    found = {}
    for position in (0, 1):
        for task in tasks_of(position):
            command, values = plan_feeder(a_job(), world, task, position)
            assert command == ("python3", "-m", "keepstep_worker", "--feed", task.role)
            assert dict(values)["KEEPSTEP_DATA_SERVICE"] == "grpc://10.0.0.8:20003"
            found[f"{task.role} {task.number}"] = dict(values)["KEEPSTEP_LISTEN"]
    assert found == {
        "dispatcher 0": "10.0.0.8:20003",
        "feeder 0": "10.0.0.8:20253",
        "feeder 1": "10.0.0.9:20253",
    }
