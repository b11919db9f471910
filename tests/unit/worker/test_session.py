"""The session against an agent that speaks the protocol: steps, snapshots, grants, restoring."""

from __future__ import annotations

import os
import threading
import time

import pytest

from keepstep_worker import wire as wires
from keepstep_worker.run import Run
from keepstep_worker.session import Session
from keepstep_worker.slab import Tensor, blob, fill, parse
from keepstep_worker.slab_view import RestoreError
from keepstep_worker.wire import StepTimes
from tests.support.fake_agent import FakeAgent, eventually


class State:
    """What a training would save: one number for each step done."""

    def __init__(self, session: Session, key: str = "replicated/w") -> None:
        self.value, self.key, self.notes = 0, key, 16
        self.session = session
        session.set_provider(self.tensors)

    def tensors(self) -> list[Tensor]:
        return [
            Tensor(self.key, "I64", (), lambda target: fill(target, self.value.to_bytes(8, "little"))),
            blob("local/notes", b"x" * self.notes, 2 * self.notes),
        ]


def value_in(agent: FakeAgent, slab: int, key: str = "replicated/w") -> int:
    file = agent.file(slab)
    place = parse(file, len(file))[0][key]
    return int.from_bytes(file[place.begin : place.end], "little")


def train(agent: FakeAgent, state: State, *steps: int) -> None:
    for step in steps:
        state.session.enter_step(step)
        state.value = step
        state.session.complete_step(step)
        agent.settle()


@pytest.fixture
def agent():
    made = FakeAgent()
    yield made
    made.close()


@pytest.fixture
def stingy():
    """An agent that grants only what the test orders."""
    made = FakeAgent(grants=False)
    yield made
    made.close()


def test_it_says_hello_and_joins(agent):
    session = agent.session()
    assert agent.wait_for("hello") == {"kind": "hello", "version": 1, "pid": os.getpid()}
    assert agent.wire.read_progress().phase == wires.PHASE_HELLO
    session.join("loop", 30)
    assert agent.wait_for("joined") == {"kind": "joined", "how": "loop", "last_step": 30}
    assert session.restored() is None
    progress = agent.wire.read_progress()
    assert (progress.phase, progress.last_step, progress.pid) == (wires.PHASE_JOINED, 30, os.getpid())


def test_a_step_is_published_when_entered_and_recorded_when_completed(agent):
    session = agent.session()
    before = time.monotonic_ns()
    session.enter_step(1, last_step=9)
    progress = agent.wire.read_progress()
    assert (progress.entered_step, progress.completed_step, progress.last_step) == (1, 0, 9)
    session.complete_step(1, StepTimes(data_ready_ns=before + 1, gradients_ready_ns=before + 2))
    assert agent.wire.read_progress().completed_step == 1
    session.enter_step(2)
    session.complete_step(2, StepTimes(start_ns=1, end_ns=2))
    (first, second), lost = agent.wire.read_since(0)
    assert (first.step, first.data_ready_ns, first.gradients_ready_ns) == (1, before + 1, before + 2)
    assert before <= first.start_ns <= first.end_ns <= time.monotonic_ns()
    assert (second.step, second.start_ns, second.end_ns, lost) == (2, 1, 2, 0)


def test_snapshots_are_sealed_at_their_cadence_and_slabs_go_round(agent):
    session = agent.session(snapshot_every=2)
    state = State(session)
    train(agent, state, *range(1, 9))
    agent.wait_for("sealed", 4)
    assert [(message["slab"], message["step"]) for message in agent.of("sealed")] == [(0, 2), (1, 4), (2, 6), (0, 8)]
    assert [(seal.slab, seal.step) for seal in agent.wire.read_seals()] == [(1, 4), (2, 6), (0, 8)]
    assert [value_in(agent, slab) for slab in (0, 1, 2)] == [8, 4, 6]
    assert len(agent.of("layout")) == 1
    assert agent.wire.read_progress().snapshot_ns > 0


@pytest.mark.parametrize(("steps", "due"), [([3, 6, 9], [3, 6, 9]), ([4, 8, 12], [4, 8, 12]), ([5, 7, 8], [5, 7])])
def test_steps_may_advance_by_more_than_one(agent, steps, due):
    session = agent.session(snapshot_every=3)
    train(agent, State(session), *steps)
    agent.wait_for("sealed", len(due))
    assert [message["step"] for message in agent.of("sealed")] == due


def test_a_grant_is_used_once_and_what_finds_none_is_skipped(stingy):
    session = stingy.session(snapshot_every=1)
    state = State(session)
    train(stingy, state, 1)
    assert stingy.wire.read_progress().skipped == 1
    stingy.order(grant=1)
    train(stingy, state, *range(2, 5))
    assert [(seal.slab, seal.step) for seal in stingy.wire.read_seals()] == [(1, 2)]
    stingy.order(hold=0)  # other orders do not renew the grant
    train(stingy, state, 5)
    stingy.order(grant=2)
    train(stingy, state, 6)
    assert [(seal.slab, seal.step) for seal in stingy.wire.read_seals()] == [(1, 2), (2, 6)]
    assert stingy.wire.read_progress().skipped == 4


def test_a_slab_of_another_layout_is_no_grant(stingy):
    session = stingy.session(snapshot_every=1, grant=7)
    train(stingy, State(session), 1)
    assert stingy.wire.read_seals() == []


def test_the_first_grant_may_come_after_the_slabs(stingy):
    session = stingy.session(snapshot_every=1)
    worker = threading.Thread(target=train, args=(stingy, State(session), 1))
    worker.start()
    stingy.wait_for("layout")
    stingy.order(grant=1)
    worker.join(20)
    assert [(seal.slab, seal.step) for seal in stingy.wire.read_seals()] == [(1, 1)]


def test_a_forced_snapshot_waits_for_its_grant(stingy):
    session = stingy.session(snapshot_every=100)
    state = State(session)
    train(stingy, state, *range(1, 4))
    worker = threading.Thread(target=session.finish)
    worker.start()
    stingy.wait_for("layout")
    assert stingy.wire.read_seals() == []
    stingy.order(grant=2)
    worker.join(20)
    assert [(seal.slab, seal.step) for seal in stingy.wire.read_seals()] == [(2, 3)]


def test_new_variables_make_a_new_layout(agent):
    session = agent.session(snapshot_every=1)
    state = State(session)
    train(agent, state, 1)
    agent.wait_for("sealed")
    state.notes = 400
    train(agent, state, 2)
    agent.wait_for("sealed", 2)
    assert [message["slab"] for message in agent.of("sealed")] == [0, 3]
    first, second = agent.of("layout")
    assert first["layout"] != second["layout"]
    assert first["bytes"] < second["bytes"]
    assert [len(agent.file(slab)) for slab in (0, 3)] == [first["bytes"], second["bytes"]]


def test_the_layout_can_be_announced_early(agent):
    session = agent.session(snapshot_every=1)
    state = State(session)
    session.announce()
    agent.wait_for("layout")
    train(agent, state, 1)
    agent.wait_for("sealed")
    assert len(agent.of("layout")) == 1


def test_where_there_is_no_memory_for_slabs_training_goes_on_and_comes_to_its_end():
    agent = FakeAgent(slabs=0, grants=False)
    try:
        state = State(agent.session(snapshot_every=2))
        train(agent, state, 1, 2, 3)
        state.session.finish()
        assert state.session.skipped == 2
        assert not agent.wire.read_seals()
    finally:
        agent.close()


def test_the_seal_is_away_while_a_slab_is_overwritten(agent):
    session = agent.session(snapshot_every=1)
    state = State(session)
    train(agent, state, 1, 2, 3)
    seen = []

    def spy(target: memoryview) -> None:
        seen.append([seal.slab for seal in agent.wire.read_seals()])
        target[:] = bytes(8)

    session.set_provider(lambda: [Tensor("replicated/w", "I64", (), spy), *state.tensors()[1:]])
    train(agent, state, 4)
    assert seen == [[1, 2]]
    assert [seal.slab for seal in agent.wire.read_seals()] == [1, 2, 0]


def test_a_later_worker_restores_what_an_earlier_one_sealed(agent):
    session = agent.session(snapshot_every=5)
    train(agent, State(session), *range(1, 13))
    agent.wait_for("sealed", 2)
    seal = agent.newest()
    session = agent.session(restore_slab=seal.slab, restore_step=10, snapshot_every=5)
    session.join("loop")
    view = session.restored()
    assert view is not None
    assert view.step == 10
    assert int.from_bytes(view.raw("replicated/w"), "little") == 10
    assert view.blob("local/notes") == b"x" * 16
    session.restoration_done(view.step)
    restored = agent.wait_for("restored")
    assert restored["step"] == 10
    assert restored["seconds"] >= 0
    progress = agent.wire.read_progress()
    assert (progress.entered_step, progress.completed_step) == (10, 10)
    train(agent, State(session), *range(11, 16))
    agent.wait_for("sealed")
    assert agent.newest().sequence > seal.sequence
    assert (agent.newest().step, agent.newest().generation) == (15, 2)


def test_what_is_not_sealed_for_the_ordered_step_is_not_restored(agent):
    session = agent.session(snapshot_every=5)
    train(agent, State(session), *range(1, 6))
    agent.wait_for("sealed")
    session = agent.session(restore_slab=0, restore_step=4)
    with pytest.raises(RestoreError, match="sealed for step 5, ordered was step 4"):
        session.restored()
    agent.wire.clear_seal(0)
    session = agent.session(restore_slab=0, restore_step=5)
    with pytest.raises(RestoreError, match="sealed for step None"):
        session.restored()


def test_a_slab_that_was_damaged_is_not_restored(agent):
    session = agent.session(snapshot_every=5)
    train(agent, State(session), *range(1, 6))
    agent.wait_for("sealed")
    os.pwrite(agent.slabs[0], b"\xff" * 8, 0)
    session = agent.session(restore_slab=0, restore_step=5)
    with pytest.raises(RestoreError, match="a header of"):
        session.restored()


def test_orders_of_another_generation_are_ignored(agent):
    session = agent.session()
    agent.order(generation=9, hold=1, drain_step=0, snapshot_every=1)
    train(agent, State(session), *range(1, 6))
    assert (agent.wire.read_progress().completed_step, agent.wire.read_seals()) == (5, [])


def test_finish_seals_the_last_step_where_it_is_not_sealed_yet(agent):
    session = agent.session(snapshot_every=4)
    train(agent, State(session), *range(1, 7))
    agent.wait_for("sealed")
    session.finish()
    agent.wait_for("sealed", 2)
    session.finish()
    assert [message["step"] for message in agent.of("sealed")] == [4, 6]
    assert agent.wire.read_progress().phase == wires.PHASE_FINISHED


def test_the_last_step_is_sealed_at_once_on_every_rank(agent):
    """Due or not, and waiting for a slab where none is granted: what follows it is no part of it."""
    session = agent.session(snapshot_every=4)
    session.join("loop", last_step=6)
    state = State(session)
    train(agent, state, *range(1, 5))
    agent.wait_for("sealed")
    agent.order(grant=-1)
    train(agent, state, 5)
    last = threading.Thread(target=train, args=(agent, state, 6))
    last.start()
    eventually(lambda: agent.wire.read_progress().completed_step == 6)
    assert last.is_alive()
    agent.order(grant=1)
    last.join(20)
    assert [message["step"] for message in agent.of("sealed")] == [4, 6]
    session.finish()
    assert agent.newest().step == 6 and len(agent.of("sealed")) == 2


def test_a_hold_that_is_lifted_lets_the_training_go_on(agent):
    session = agent.session(hold=1)
    worker = threading.Thread(target=session.enter_step, args=(1,))
    worker.start()
    eventually(lambda: agent.wire.read_progress().entered_step == 1)
    assert worker.is_alive()
    agent.order(hold=0)
    worker.join(20)
    assert not worker.is_alive()


def test_steps_up_to_the_drain_step_are_executed_under_a_hold(agent):
    session = agent.session(hold=1, drain_step=4)
    state = State(session)
    train(agent, state, *range(1, 4))
    session.enter_step(4)
    assert agent.wire.read_progress().entered_step == 4


def test_without_an_environment_there_is_no_session(monkeypatch):
    for name in ("KEEPSTEP_WIRE_FD", "KEEPSTEP_SOCKET_FD"):
        monkeypatch.delenv(name, raising=False)
    assert Session.current() is None


def test_a_step_that_turns_out_not_to_be_one_is_taken_back(agent):
    session = agent.session()
    train(agent, State(session), 1, 2)
    session.enter_step(3)
    assert session.leave_step() == 2
    progress = agent.wire.read_progress()
    assert (progress.entered_step, progress.completed_step) == (2, 2)
    assert session.leave_step() == 2


@pytest.mark.parametrize(("drain_step", "completed"), [(3, 3), (2, 2)])
def test_where_all_are_to_stop_at_a_step_that_is_none_it_counts_as_completed(agent, drain_step, completed):
    """The agent has read that step 3 was entered, and waits for the others, when it turns out that there is none."""
    session = agent.session()
    train(agent, State(session), 1, 2)
    session.enter_step(3)
    agent.order(hold=1)
    left: list[int] = []
    worker = threading.Thread(target=lambda: left.append(session.leave_step()))
    worker.start()
    eventually(lambda: agent.wire.read_progress().entered_step == 2)
    assert worker.is_alive()
    agent.order(drain_step=drain_step)
    worker.join(20)
    assert left == [completed]
    progress = agent.wire.read_progress()
    assert (progress.entered_step, progress.completed_step) == (completed, completed)


def test_a_hold_that_is_lifted_lets_a_step_that_is_none_go(agent):
    session = agent.session()
    session.enter_step(1)
    agent.order(hold=1)
    left: list[int] = []
    worker = threading.Thread(target=lambda: left.append(session.leave_step()))
    worker.start()
    eventually(lambda: agent.wire.read_progress().entered_step == 0)
    agent.order(hold=0)
    worker.join(20)
    assert left == [0]


def test_what_is_no_step_waits_where_the_agent_holds(agent):
    session = agent.session()
    session.hold()
    agent.order(hold=1)
    worker = threading.Thread(target=session.hold)
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    agent.order(drain_step=1)
    worker.join(20)
    assert not worker.is_alive()


def test_the_time_that_a_restoration_took_is_counted_from_where_it_is_said_to_have_begun(agent):
    session = agent.session()
    session.restoration_done(0, time.monotonic_ns() - 3_600_000_000_000)
    assert 3600 <= agent.wait_for("restored")["seconds"] < 7200
    session.restoration_done(0)
    assert agent.wait_for("restored", 2)["seconds"] < 3600


def test_a_run_tells_numbers_and_is_told_when_to_hold(agent):
    run = Run(agent.session())
    assert not run.should_stop
    run.log_metric("loss", 0.5)
    assert agent.wait_for("metric") == {"kind": "metric", "name": "loss", "value": 0.5}
    agent.order(hold=1)
    assert run.should_stop


@pytest.mark.parametrize(("name", "value"), [("", 1.0), ("a b", 1.0), ("1st", 1.0), ("x" * 65, 1.0), ("loss", "much")])
def test_what_is_no_metric_is_refused_without_an_agent_too(name, value):
    with pytest.raises(ValueError, match=name or "letters"):
        Run(None).log_metric(name, value)


def test_outside_keepstep_nothing_holds_and_nobody_is_told():
    run = Run(None)
    run.log_metric("loss", 0.5)
    assert not run.should_stop
