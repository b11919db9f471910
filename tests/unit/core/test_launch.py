"""What a worker is started with."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.job import PORT_SPAN, port_from
from keepstep.core.launch import plan_worker
from keepstep.core.launch.multi_worker import tf_config
from keepstep.core.policy import Policy
from keepstep.intake.policy import load_policy
from tests.unit.core.values import a_job

ADDRESSES = ("10.0.0.1:20003", "10.0.0.2:20003")


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
    command, environment = plan_worker(a_job(), 3, ADDRESSES, 1, Policy())
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
    values = dict(plan_worker(job, 3, ADDRESSES, 1, policy, 0 if full == "3" else int(full))[1])
    assert (values["KEEPSTEP_WORLD_SIZE"], values["KEEPSTEP_FULL_WORLD"]) == ("2", full)
    assert values["KEEPSTEP_BATCH"] == batch


@pytest.mark.parametrize("strategy", ["plain", "mirrored"])
def test_one_host_needs_no_tf_config(strategy):
    job = a_job(strategy=strategy, hosts=("algo-1",))
    assert "TF_CONFIG" not in dict(plan_worker(job, 3, ADDRESSES[:1], 0, Policy())[1])


def test_tensorflow_is_told_how_long_to_wait_for_its_peers():
    policy = load_policy("default", ["coordination.lease=3s", "hang.first_step=5min"])
    values = dict(plan_worker(a_job(), 3, ADDRESSES, 1, policy)[1])
    assert (values["KEEPSTEP_HEARTBEAT_S"], values["KEEPSTEP_REGISTER_S"]) == ("6", "300")


@given(st.integers(1, 10**6))
def test_generations_that_overlap_in_time_share_no_port(number):
    ports = [port_from(a_job().port_base, number + later) for later in range(PORT_SPAN)]
    assert len(set(ports)) == PORT_SPAN
    assert all(20000 <= port < 20000 + PORT_SPAN for port in ports)
