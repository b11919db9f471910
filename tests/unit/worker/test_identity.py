"""Who a worker is, and what a script is told of its world."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from keepstep_worker.identity import Identity, IdentityError, is_worker, read_descriptors, read_identity
from keepstep_worker.run import Run

ENVIRONMENT = {
    "KEEPSTEP_GENERATION": "7", "KEEPSTEP_RANK": "1", "KEEPSTEP_LOCAL_RANK": "0", "KEEPSTEP_WORLD_SIZE": "2",
    "KEEPSTEP_FULL_WORLD": "3", "KEEPSTEP_BATCH": "keep_local", "KEEPSTEP_PARENT_PID": "42",
}  # fmt: skip


def test_an_identity_is_read_whole():
    assert read_identity(ENVIRONMENT) == Identity(7, 1, 0, 2, 42, "", "auto", 3, "keep_local")


def test_what_is_not_said_has_a_default():
    assert read_identity({"KEEPSTEP_GENERATION": "1"}) == Identity(1)
    assert (Identity(1).full_world, Identity(1).batch) == (0, "keep_global")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"KEEPSTEP_GENERATION": ""}, "KEEPSTEP_GENERATION"),
        ({"KEEPSTEP_FULL_WORLD": "all"}, "KEEPSTEP_FULL_WORLD"),
        ({"KEEPSTEP_BATCH": "keep"}, "wanted keep_global or keep_local"),
    ],
)
def test_a_malformed_environment_is_the_agents_fault(change, why):
    with pytest.raises(IdentityError, match=why):
        read_identity({**ENVIRONMENT, **change})


def test_descriptors_make_a_worker():
    both = {"KEEPSTEP_WIRE_FD": "3", "KEEPSTEP_SOCKET_FD": "4"}
    assert is_worker(both) and not is_worker({"KEEPSTEP_WIRE_FD": "3"})
    assert read_descriptors(both) == (3, 4)
    with pytest.raises(IdentityError, match="KEEPSTEP_SOCKET_FD"):
        read_descriptors({"KEEPSTEP_WIRE_FD": "3"})


@pytest.mark.parametrize(
    ("world_size", "full_world", "batch", "seen"),
    [
        (2, 3, "keep_local", (2, 3, pytest.approx(2 / 3))),
        (3, 3, "keep_local", (3, 3, 1.0)),
        (2, 3, "keep_global", (2, 3, 1.0)),
        (2, 0, "keep_local", (2, 2, 1.0)),
    ],
)
def test_a_script_sees_its_world_and_what_the_learning_rate_is_to_be_scaled_by(world_size, full_world, batch, seen):
    who = Identity(1, 1, 0, world_size, full_world=full_world, batch=batch)
    run = Run(SimpleNamespace(identity=who))
    assert (run.world_size, run.full_world_size, run.learning_rate_scale) == seen


def test_outside_keepstep_the_cluster_is_tensorflows_own_and_whole(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 2}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    run = Run(None)
    assert (run.rank, run.world_size, run.full_world_size, run.learning_rate_scale) == (2, 3, 3, 1.0)


def test_a_batch_comes_from_a_dataset():
    with pytest.raises(RuntimeError, match="call dataset"):
        _ = Run(None).global_batch
    with pytest.raises(RuntimeError, match="call dataset"):
        Run(None).scale_loss([1.0])
