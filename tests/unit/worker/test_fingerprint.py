"""Which step is looked at, and what the agent is told of it. What TensorFlow makes of it is shown elsewhere."""

from __future__ import annotations

import pytest

from keepstep_worker import fingerprint
from keepstep_worker.fingerprint import Fingerprints
from tests.support.fake_agent import FakeAgent


@pytest.fixture
def state(monkeypatch):
    fresh = fingerprint._State()
    monkeypatch.setattr(fingerprint, "_state", fresh)
    return fresh


@pytest.fixture
def told(state):
    return []


@pytest.fixture
def agent():
    made = FakeAgent()
    yield made
    made.close()


def train(session, state, *steps: int) -> None:
    """Each step has gradients that add up to its number, where it is looked at."""
    for step in steps:
        session.enter_step(step)
        state.found = 16 * step if state.wanted else state.found
        session.complete_step(step)


def test_one_step_is_looked_at_and_told_once(agent, state):
    session = agent.session()
    train(session, state, 1, 2)
    agent.order(fingerprint=4)
    train(session, state, 3, 4, 5, 6)
    assert agent.wait_for("fingerprint") == {"kind": "fingerprint", "step": 4, "value": f"{64:016x}", "why": ""}
    agent.order(fingerprint=7)
    train(session, state, 7)
    agent.order(fingerprint=0)
    train(session, state, 8)
    assert agent.wait_for("fingerprint", 2)["value"] == f"{112:016x}"
    agent.settle()
    assert len(agent.of("fingerprint")) == 2


def test_what_was_entered_before_it_was_wanted_went_by_unseen(agent, state):
    session = agent.session()
    train(session, state, 1, 2, 3)
    agent.order(fingerprint=3)
    train(session, state, 4, 5)
    assert agent.wait_for("fingerprint") == {"kind": "fingerprint", "step": 3, "value": "", "why": ""}
    agent.settle()
    assert len(agent.of("fingerprint")) == 1


def test_the_first_step_behind_a_restored_one_is_looked_at(agent, state):
    session = agent.session(fingerprint=41)
    session.restoration_done(40)
    train(session, state, 41)
    assert agent.wait_for("fingerprint")["value"] == f"{656:016x}"


def test_of_steps_that_are_executed_in_one_go_all_are_looked_at(agent, state):
    session = agent.session(fingerprint=5)
    train(session, state, 4, 8)
    assert agent.wait_for("fingerprint") == {"kind": "fingerprint", "step": 5, "value": f"{128:016x}", "why": ""}


def test_a_step_that_was_not_executed_after_all_is_looked_at_when_it_is(told, state):
    prints = Fingerprints(told.append)
    prints.enter(3, 2, 3)
    prints.enter(3, 2, 3)
    state.found = 5
    prints.complete(3)
    assert [message["value"] for message in told] == [f"{5:016x}"]


@pytest.mark.parametrize(("why", "said"), [("", fingerprint.UNSEEN), ("compiled", "compiled")])
def test_where_no_gradients_are_ever_seen_it_is_said_why(told, state, why, said):
    state.why = why
    prints = Fingerprints(told.append)
    prints.enter(1, 0, 1)
    prints.complete(1)
    assert told == [{"kind": "fingerprint", "step": 1, "value": "", "why": said}]


def test_nothing_is_looked_at_unless_the_agent_may_ask(state, monkeypatch):
    seen = []
    monkeypatch.setattr(fingerprint, "_see", seen.append)
    fingerprint.see(["gradients"])
    monkeypatch.setenv("KEEPSTEP_FINGERPRINT", "on")
    fingerprint.see(["gradients"])
    assert seen == [["gradients"]]


def test_what_goes_wrong_costs_the_fingerprint_and_not_the_step(told, state, monkeypatch, capsys):
    monkeypatch.setenv("KEEPSTEP_FINGERPRINT", "on")
    monkeypatch.setattr(fingerprint, "_see", lambda gradients: 1 / 0)
    fingerprint.see([])
    fingerprint.see([])
    assert capsys.readouterr().err.count("gradients are not looked at any more") == 1
    prints = Fingerprints(told.append)
    prints.enter(1, 0, 1)
    prints.complete(1)
    assert told[0]["value"] == ""
    assert "ZeroDivisionError" in told[0]["why"]
