"""A custom loop with three lines of keepstep: resumed bit for bit, and plain TensorFlow without an agent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepstep_worker.slab import parse
from keepstep_worker.wire import StepRecord
from tests.e2e.cluster import cluster
from tests.support.fake_agent import FakeAgent

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("loop_job.py")
PYTHON = os.environ.get("KEEPSTEP_TF_PYTHON", str(ROOT / ".venv-tf" / "bin" / "python"))
DEADLINE_S = 100
PAUSE_NS = 50_000_000
"""See loop_job.py."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def train(
    tmp_path: Path,
    last_step: int,
    *options: str,
    agents: list[FakeAgent] | None = None,
    hosts: int = 1,
    job: Path = JOB,
    told: Mapping[str, str] | None = None,
    **orders: int,
) -> tuple[list[dict[str, Any]], list[int]]:
    """Train to the last step, each host under its agent where there are any; returns results and exit codes.

    `told` is what the agents put into the environment beside the usual.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    workers, outs, described = [], [], cluster(hosts)
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    folder.mkdir()
    for rank in range(hosts):
        outs.append(folder / f"{rank}.json")
        if hosts > 1:
            environment["TF_CONFIG"] = json.dumps({"cluster": described, "task": {"type": "worker", "index": rank}})
        command = [
            str(job),
            str(last_step),
            str(outs[-1]),
            *(option for option in options if not option.endswith(f"~{1 - rank}")),
        ]
        command = [option.partition("~")[0] for option in command]
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((folder / f"{rank}.log").open("wb"))
            more: dict[str, str] = {}
            fds: tuple[int, ...] = ()
            if agents:
                endpoint = stack.enter_context(agents[rank].connect(**orders))
                fds = (agents[rank].wire_fd, endpoint.fileno())
                more = agents[rank].environment(endpoint, KEEPSTEP_RANK=str(rank), KEEPSTEP_WORLD_SIZE=str(hosts))
                more |= told or {}
                command = ["-m", "keepstep_worker", *command]
            workers.append(
                subprocess.Popen([PYTHON, *command], env={**environment, **more}, pass_fds=fds, stdout=log, stderr=log)
            )
    try:
        for worker in workers:
            worker.wait(timeout=DEADLINE_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    codes = [worker.returncode for worker in workers]
    if not any(option.startswith("die=") for option in options):
        assert codes == [0] * hosts, "".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(hosts))
    return [json.loads(out.read_text()) for out in outs if out.exists()], codes


@pytest.fixture
def agents():
    made = [FakeAgent(), FakeAgent()]
    yield made
    for agent in made:
        agent.close()


def resume_orders(agents: list[FakeAgent], step: int) -> dict[str, int]:
    """Where both hosts have this step sealed: in one slab number, since both have sealed alike."""
    slabs = {seal.slab for agent in agents for seal in agent.wire.read_seals() if seal.step == step}
    assert len(slabs) == 1
    return {"restore_slab": slabs.pop(), "restore_step": step}


def assert_replicated_parts_equal(agents: list[FakeAgent]) -> None:
    """The newest slabs hold the replicated tensors first, as one range of bytes that is the same on both hosts."""
    parts = []
    for agent in agents:
        file = agent.file(agent.newest().slab)
        places, _ = parse(file, len(file))
        replicated = [key for key in places if key.startswith("replicated/")]
        assert list(places)[: len(replicated)] == replicated
        assert {"local/data", "local/noise/state", "local/keepstep/random"} <= set(places)
        parts.append(file[places[replicated[0]].begin : places[replicated[-1]].end])
    assert parts[0] == parts[1]
    assert len(parts[0]) > 0


def state_of(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("trainable", "slots", "local", "position")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("flavour", ["keras3", "legacy"])
def test_a_world_that_lost_a_worker_ends_where_the_undisturbed_one_does(tmp_path, agents, flavour):
    options = ["legacy"] if flavour == "legacy" else []
    whole, _ = train(tmp_path, 12, *options, hosts=2)
    assert whole[0]["trainable"] == whole[1]["trainable"]
    assert whole[0]["slots"] == whole[1]["slots"]
    assert whole[0]["local"] != whole[1]["local"]  # BatchNorm's statistics are each rank's own

    _, codes = train(tmp_path, 12, *options, "pause", "die=8~1", agents=agents, hosts=2, snapshot_every=3)
    assert codes[1] == -9
    assert codes[0] != 0
    seals = [{seal.step for seal in agent.wire.read_seals()} for agent in agents]
    assert max(seals[0] & seals[1]) == 6
    resumed, _ = train(tmp_path, 12, *options, agents=agents, hosts=2, snapshot_every=3, **resume_orders(agents, 6))
    assert_replicated_parts_equal(agents)
    for rank in (0, 1):
        assert agents[rank].wait_for("restored")["step"] == 6
        assert agents[rank].of("joined") == [{"kind": "joined", "how": "loop", "last_step": 0}]
        assert agents[rank].newest().step == 12
        assert state_of(resumed[rank]) == state_of(whole[rank])
        assert resumed[rank]["drawn"] == whole[rank]["drawn"][6:]
        assert (resumed[rank]["rank"], resumed[rank]["world_size"], resumed[rank]["generation"]) == (rank, 2, 2)


def test_strings_come_back_though_they_outgrow_what_was_laid_out_for_them(tmp_path, agents):
    _, codes = train(tmp_path, 12, "words", "pause", "die=11", agents=agents[:1], snapshot_every=3)
    assert codes == [-9]
    layouts = [seal.layout for seal in agents[0].wire.read_seals()]
    assert len(set(layouts)) > 1
    resumed, _ = train(tmp_path, 12, "words", agents=agents[:1], snapshot_every=3, **resume_orders(agents[:1], 9))
    assert [drawn[0] for drawn in resumed[0]["drawn"]] == [10, 11, 12]
    assert resumed[0]["words"] == list(range(1, 13))


def test_one_host_takes_over_what_two_have_begun(tmp_path, agents):
    both, _ = train(tmp_path, 3, agents=agents, hosts=2, snapshot_every=3)
    alone, _ = train(tmp_path, 9, agents=agents[:1], snapshot_every=3, **resume_orders(agents, 3))
    labels = [[*a[3], *b[3]] for a, b in zip(both[0]["drawn"], both[1]["drawn"], strict=True)]
    labels += [drawn[3] for drawn in alone[0]["drawn"]]
    assert [len(batch) for batch in labels] == [20, 20, 20, 20, 10, 20, 20, 20, 20]
    reference, _ = train(tmp_path, 9)
    assert labels == [drawn[3] for drawn in reference[0]["drawn"]]


def test_a_state_that_does_not_fit_is_refused_with_the_names(tmp_path, agents):
    train(tmp_path, 3, agents=agents[:1], snapshot_every=3)
    with pytest.raises(AssertionError, match=r"RestoreError: the state of step 3 does not fit.*missing: .*left over: "):
        train(tmp_path, 6, "legacy", agents=agents[:1], **resume_orders(agents[:1], 3))


def test_without_an_agent_it_is_plain_tensorflow(tmp_path):
    plain, _ = train(tmp_path, 5)
    assert (plain[0]["rank"], plain[0]["world_size"], plain[0]["generation"]) == (0, 1, 0)
    assert [drawn[0] for drawn in plain[0]["drawn"]] == [1, 2, 3, 4, 5]


def test_own_work_is_measured_on_every_rank_of_a_world(tmp_path, agents):
    train(tmp_path, 20, "loose", agents=agents, hosts=2)
    for agent in agents:
        assert len(measured_of(agent, 20)) > 1


def test_what_a_loop_does_behind_its_function_is_no_waiting(tmp_path, agents):
    """The pause of a rank lies between two steps: the others wait for it."""
    train(tmp_path, 8, "loose", "pause~0", agents=agents, hosts=2)
    slept, waited = (agent.wire.read_since(0)[0] for agent in agents)
    assert all(after.start_ns - before.end_ns >= PAUSE_NS for before, after in pairwise(slept))
    assert sum(after.start_ns - before.end_ns for before, after in pairwise(waited)) < PAUSE_NS * 7


def test_what_a_step_does_between_its_batches_is_no_waiting_for_data(tmp_path, agents):
    """As gradients are accumulated: a slow processor would look like slow data."""
    train(tmp_path, 3, "loose", "accumulate", agents=agents[:1])
    for record in measured_of(agents[0], 3):
        assert record.gradients_ready_ns - record.data_ready_ns >= 3 * PAUSE_NS
        assert record.data_ready_ns - record.start_ns <= record.end_ns - record.start_ns - 3 * PAUSE_NS


def measured_of(agent: FakeAgent, last_step: int) -> list[StepRecord]:
    """The records of steps whose gradients were timed, the first of them all and one in a while; times in order."""
    records, lost = agent.wire.read_since(0)
    assert ([record.step for record in records], lost) == (list(range(1, last_step + 1)), 0)
    measured = [record for record in records if record.gradients_ready_ns]
    for record in measured:
        assert record.start_ns < record.data_ready_ns < record.gradients_ready_ns <= record.end_ns
    assert measured[0].step == 1
    return measured


def test_what_the_probe_was_put_into_can_be_exported_and_older_graphs_are_left_alone(tmp_path, agents):
    # times are read a few times in a second, and a reading in the middle of which something else ran counts for none
    (told,), _ = train(tmp_path, 1000, agents=agents[:1], job=Path(__file__).with_name("exporting_job.py"))
    assert told["loss"] > 0.0
    assert told["old"] == 6.0
    records, _ = agents[0].wire.read_since(0)
    assert any(record.gradients_ready_ns and record.data_ready_ns for record in records)


def test_own_work_is_measured_with_tf_keras_too(tmp_path, agents):
    train(tmp_path, 3, "legacy", "loose", agents=agents[:1])
    measured_of(agents[0], 3)


@pytest.mark.parametrize("option", ["jit", "deterministic"])
def test_where_time_can_not_be_taken_gradients_are_not_measured_and_nothing_breaks(tmp_path, agents, option):
    train(tmp_path, 3, option, *(["loose"] if option == "jit" else []), agents=agents[:1])
    records, _ = agents[0].wire.read_since(0)
    assert [(record.step, record.gradients_ready_ns) for record in records] == [(1, 0), (2, 0), (3, 0)]


def test_a_function_with_fingerprints_can_be_compiled_by_xla_later(tmp_path, agents):
    train(tmp_path, 3, "late", agents=agents[:1], told={"KEEPSTEP_FINGERPRINT": "on"})
    assert len(agents[0].wire.read_since(0)[0]) == 3


def test_a_function_that_was_measured_can_be_compiled_by_xla_later(tmp_path, agents):
    train(tmp_path, 3, "late", "loose", agents=agents[:1])
    records, _ = agents[0].wire.read_since(0)
    assert [(record.step, record.gradients_ready_ns > 0) for record in records] == [(1, True), (2, False), (3, False)]


def test_unequal_parts_give_the_gradient_of_the_whole_batch(tmp_path, agents):
    """As one process computes it from the same global batches, a smaller last one of an epoch included."""
    job = Path(__file__).with_name("gradient_job.py")
    parts, _ = train(tmp_path, 5, agents=agents, hosts=2, job=job, told={"KEEPSTEP_WEIGHTS": "1333,667"})
    (alone,), _ = train(tmp_path, 5, job=job)
    assert [each["local_batch"] for each in parts] == [13, 8]
    assert [[step["samples"] for step in each["steps"]] for each in parts] == [[13, 13, 13, 0, 13], [8, 8, 8, 1, 8]]
    for number, step in enumerate(alone["steps"]):
        assert step["samples"] == sum(each["steps"][number]["samples"] for each in parts)
        for each in parts:
            for found, wanted in zip(each["steps"][number]["gradients"], step["gradients"], strict=True):
                for row, wanted_row in zip(found, wanted, strict=True):
                    assert row == pytest.approx(wanted_row, rel=1e-5, abs=1e-6)
    for agent in agents:
        assert agent.of("divides") == [{"kind": "divides"}]
