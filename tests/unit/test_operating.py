"""An operator's orders are records that the core understands, and the status shows what the records say."""

from __future__ import annotations

import asyncio
import json

import pytest

from keepstep.adapters.coordinator_memory import MemoryCoordinator
from keepstep.app.operating import FILE, Operator, describe, find_entry, tell
from keepstep.core.codec import encode_record
from keepstep.core.records import (
    CordonRecord,
    EtcdRecord,
    GenerationRecord,
    LeaderRecord,
    Member,
    NodeRecord,
    OrderRecord,
    Phase,
    RequestRecord,
    Standing,
    StatusRecord,
)
from keepstep.errors import ConfigError, QuorumError

PREFIX = "/keepstep/digits/"
MEMBERS = (Member("algo-1", "algo-1-x"), Member("algo-2", "algo-2-x"), Member("algo-3", "gone"))
JOB = (
    NodeRecord("algo-1", "algo-1-x", "algo-1", 1),
    NodeRecord("algo-2", "algo-2-x", "algo-2", 2),
    NodeRecord("algo-10", "algo-10-x", "algo-10", 3),
    LeaderRecord("algo-2", "algo-2-x"),
    EtcdRecord(("algo-1", "algo-2", "algo-3")),
    GenerationRecord(
        4, Phase.READY, "algo-2-x", MEMBERS,
        restarts=2, durable_step=40,
    ),
    StatusRecord("algo-1", "algo-1-x", 4, Standing.RUNNING, step=47, sealed=45),
)  # fmt: skip


def run(work, *records):
    """What `work(operator)` gives, and the records that the job has then."""

    async def play():
        coordinator = MemoryCoordinator(lambda: 0.0)
        for record in records:
            await coordinator.put(PREFIX + record.key, encode_record(record))
        operator = Operator(coordinator, PREFIX, "ada")
        try:
            return await work(operator), await operator.records()
        finally:
            await coordinator.close()

    return asyncio.run(play())


def test_a_drain_is_an_interruption_of_the_whole_job():
    _, records = run(lambda operator: operator.drain(60.0), *JOB)
    (request,) = [record for record in records if isinstance(record, RequestRecord)]
    assert (request.host, request.source, request.deadline - request.at) == ("operator", "drain by ada", 60.0)


def test_a_restart_is_an_order_of_its_own_each_time():
    async def twice(operator):
        await operator.restart()
        await operator.restart()

    _, records = run(twice, *JOB)
    assert len({record.order_id for record in records if isinstance(record, OrderRecord)}) == 2


def test_a_cordon_stands_until_it_is_taken_back():
    said, records = run(lambda operator: operator.cordon("algo-10", "slow fan"), *JOB)
    (cordon,) = [record for record in records if isinstance(record, CordonRecord)]
    assert (said, cordon.host, cordon.by, cordon.why) == ("algo-10 is cordoned", "algo-10", "ada", "slow fan")
    _, records = run(lambda operator: operator.uncordon("algo-10"), *JOB, cordon)
    assert not any(isinstance(record, CordonRecord) for record in records)


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (lambda operator: operator.cordon("algo-7", ""), "one of algo-1, algo-10, algo-2, algo-3"),
        (lambda operator: operator.uncordon("algo-1"), "not cordoned"),
    ],
)
def test_an_order_for_a_host_that_is_not_meant_is_refused(work, wanted):
    with pytest.raises(ConfigError) as raised:
        run(work, *JOB)
    assert wanted in raised.value.describe()


def test_a_job_without_hosts_takes_no_orders():
    with pytest.raises(QuorumError):
        run(lambda operator: operator.restart())


def test_the_status_has_a_row_for_each_host_in_natural_order():
    described = describe([*JOB, CordonRecord("algo-10", "ada", 0.0)])
    assert json.loads(json.dumps(described)) == described
    rows = {row["host"]: row for row in described["hosts"]}
    assert list(rows) == ["algo-1", "algo-2", "algo-3", "algo-10"]
    assert (rows["algo-1"]["rank"], rows["algo-1"]["standing"], rows["algo-1"]["step"]) == (0, "running", 47)
    assert (rows["algo-2"]["marks"], rows["algo-10"]["marks"]) == (["leader", "etcd"], ["cordoned"])
    assert [rows[host]["standing"] for host in ("algo-2", "algo-3", "algo-10")] == ["starting", "lost", "out"]
    assert described["generation"]["number"] == 4
    table = tell("digits", described).splitlines()
    assert table[0] == "digits: generation 4 ready, 2 restarts, committed step 40"
    assert table[2].split() == ["algo-1", "algo-1-x", "0", "running", "47", "45", "etcd"]


def test_the_status_says_why_a_host_is_out_and_what_holds_one_up():
    strained = StatusRecord("algo-1", "algo-1-x", 4, Standing.RUNNING, strains=("GPU-a: 95 degrees Celsius",))
    cordon = CordonRecord("algo-3", "health", 0.0, "GPU-c: Xid 79")
    told = tell("digits", describe([*JOB[:-1], strained, cordon])).splitlines()
    assert told[-2:] == [
        "algo-1 is strained: GPU-a: 95 degrees Celsius",
        "algo-3 is cordoned by health: GPU-c: Xid 79",
    ]


def test_a_job_that_has_no_generation_yet_can_be_shown():
    assert tell("digits", describe([])).splitlines()[0] == "digits: no generation yet"


def test_the_entry_is_found_in_a_scratch_folder_and_in_a_local_run(tmp_path):
    scratch = tmp_path / "hosts" / "algo-1" / "scratch"
    scratch.mkdir(parents=True)
    (scratch / FILE).write_text(
        json.dumps({"job": "digits", "prefix": PREFIX, "endpoints": ["http://a:1"], "tls": None})
    )
    entry = find_entry(tmp_path)
    assert entry == find_entry(scratch) == find_entry(scratch / FILE)
    assert (entry.job, entry.endpoints, entry.tls) == ("digits", ("http://a:1",), None)


@pytest.mark.parametrize("content", [None, "", "{}", '{"job": 1, "prefix": "/", "endpoints": 3, "tls": null}'])
def test_an_entry_that_is_not_what_an_agent_writes_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError) as raised:
        find_entry(tmp_path)
    assert str(tmp_path) in raised.value.describe()
