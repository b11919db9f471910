"""Old news about records: whatever comes late or twice, what is known never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core import cluster
from keepstep.core.decide import decide
from keepstep.core.events import ClusterRead, RecordGone, RecordPut, RecordsChanged, RecordSeen
from keepstep.core.records import LeaderRecord, NodeRecord, Standing, StatusRecord
from keepstep.core.state import Turn
from tests.unit.core.values import a_generation, a_turn

NODE = NodeRecord("algo-1", "one", "10.0.0.1", 1)


def known(turn: Turn) -> set[str]:
    return set(turn.state.cluster.nodes)


def test_a_puts_answer_after_the_records_end_does_not_bring_it_back():
    turn = a_turn()
    cluster.on_cluster_read(turn, ClusterRead(()))
    cluster.on_record_gone(turn, RecordGone("alive/algo-1", 10))
    cluster.on_record_put(turn, RecordPut("put:alive/algo-1", NODE, 9))
    assert known(turn) == set()


def test_a_puts_answer_before_the_watch_is_believed():
    turn = a_turn()
    cluster.on_cluster_read(turn, ClusterRead(((LeaderRecord("algo-2", "two"), 5),)))
    cluster.on_record_put(turn, RecordPut("put:alive/algo-1", NODE, 9))
    assert known(turn) == {"algo-1"}


def test_a_puts_answer_hides_nothing_that_the_watch_has_yet_to_tell():
    turn = a_turn()
    cluster.on_record_put(turn, RecordPut("put:alive/algo-1", NODE, 9))
    cluster.on_record_seen(turn, RecordSeen(LeaderRecord("algo-2", "two"), 8))
    assert turn.state.cluster.leader is not None


def test_an_older_generation_at_a_newer_revision_is_dropped():
    turn = a_turn()
    cluster.on_record_seen(turn, RecordSeen(a_generation(number=5), 1))
    cluster.on_record_seen(turn, RecordSeen(a_generation(number=4), 2))
    assert turn.generation is not None and turn.generation.number == 5


@given(st.lists(st.sampled_from(["put", "gone"]), min_size=1, max_size=8), st.integers(0, 8))
def test_a_watch_that_tells_its_past_again_changes_nothing(history, repeated):
    turn = a_turn()
    events = [
        RecordSeen(NODE, revision) if what == "put" else RecordGone("alive/algo-1", revision)
        for revision, what in enumerate(history, start=1)
    ]
    for event in (*events, *events[:repeated]):
        (cluster.on_record_seen if isinstance(event, RecordSeen) else cluster.on_record_gone)(turn, event)
    assert known(turn) == ({"algo-1"} if history[-1] == "put" else set())


CHANGES = [
    *(NodeRecord(host, node, "10.0.0.1", 1) for host in ("algo-1", "algo-2") for node in ("one", "two")),
    *(StatusRecord("algo-2", "two", 3, Standing.RUNNING, step=step) for step in (1, 2)),
    LeaderRecord("algo-2", "two"),
    *(a_generation(number=number) for number in (4, 5)),
]


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.booleans()), min_size=1, max_size=8))
def test_changes_told_together_are_known_as_if_told_one_by_one(history):
    changes = tuple(
        RecordGone(record.key, revision) if gone else RecordSeen(record, revision)
        for revision, (record, gone) in enumerate(history, start=1)
    )
    one_by_one = a_turn()
    for change in changes:
        (cluster.on_record_seen if isinstance(change, RecordSeen) else cluster.on_record_gone)(one_by_one, change)
    before = a_turn().state
    together = decide(before, RecordsChanged(changes), 1_000.0).state
    assert together.cluster == one_by_one.state.cluster
    assert (together.sighted, together.absent) == (one_by_one.state.sighted, one_by_one.state.absent)
