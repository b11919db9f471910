"""What a snapshot leaves to be copied while the training goes on: of the moment it was due, sealed when it is whole."""

from __future__ import annotations

import threading

import pytest

from keepstep_worker import memory, slab, snapshots, streaming
from keepstep_worker.session import Session
from keepstep_worker.slab import Reader, SlabError, Tensor, parse
from tests.support.fake_agent import FakeAgent, eventually

KEY = "replicated/w"


class Held:
    """A number for each step done, whose bytes last; what copies them can be made to wait, or to fail."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.value, self.lasts = 0, True
        self.wrong: Exception | None = None
        self.threads: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.session = session
        self._reader = Reader(self.read, pytest.fail, lambda: self.lasts)
        self._move = streaming._move
        monkeypatch.setattr(streaming, "_stream", lambda: None)
        monkeypatch.setattr(streaming, "_move", self.move)
        session.set_provider(self.tensors)

    def tensors(self) -> list[Tensor]:
        other = Tensor("local/x", "U8", (1,), lambda target: None)
        return [other, Tensor(KEY, "I64", (), lambda target: pytest.fail("alone"), None, self._reader)]

    def read(self, things):
        for _ in things:
            yield [bytearray(self.value.to_bytes(8, "little"))]

    def move(self, pieces):
        pieces = list(pieces)
        if pieces:
            self.threads.append(threading.current_thread().name)
            assert self.goes_on.wait(20)
            if self.wrong is not None:
                raise self.wrong
            self._move(pieces)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.session.enter_step(step)
            self.value = step
            self.session.complete_step(step)


@pytest.fixture
def agent(monkeypatch):
    made = FakeAgent()
    monkeypatch.setattr(memory, "has_room", lambda size_bytes: True)
    monkeypatch.setattr(snapshots, "_BESIDE_BYTES_MIN", 0)
    yield made
    made.close()


@pytest.fixture
def held(agent, monkeypatch):
    """A training that takes a snapshot every third step, and has its slabs already."""
    made = Held(agent.session(snapshot_every=3), monkeypatch)
    made.session.announce()
    agent.wait_for("layout")
    eventually(lambda: not made.session._slabs.awaited or made.session._poll())
    eventually(lambda: made.session._slabs.granted(0, made.session._slabs.layout_number, prepared=True) is not None)
    made.session._slabs._copy_ns = 1  # one was measured before
    return made


def sealed(agent: FakeAgent, step: int) -> int:
    """The number in the slab that is sealed for a step."""
    seal = next(seal for seal in agent.wire.read_seals() if seal.step == step)
    file = agent.file(seal.slab)
    place = parse(file, len(file))[0][KEY]
    return int.from_bytes(file[place.begin : place.end], "little")


def test_what_is_written_is_the_state_of_the_step_and_not_of_a_later_one(agent, held):
    held.goes_on.clear()
    held.train(1, 2, 3, 4)
    assert held.session.completed_step == 4
    assert not agent.wire.read_seals(), "nothing is sealed before it is whole"
    assert not agent.of("sealed")
    held.goes_on.set()
    eventually(agent.wire.read_seals)  # the agent sees it on the wire, whatever the training is about
    eventually(lambda: held.session._slabs._copy.done())
    held.train(5)
    assert agent.wait_for("sealed")["step"] == 3
    assert sealed(agent, 3) == 3
    assert held.threads[0].startswith("keepstep-copy")


def test_it_is_had_before_a_step_is_entered_that_another_one_is_due_after(agent, held):
    """Who has done that step may write over the snapshot before: all ranks would have none in common then."""
    held.goes_on.clear()
    held.train(1, 2, 3, 4, 5)
    sixth = threading.Thread(target=held.session.enter_step, args=(6,))
    sixth.start()
    eventually(lambda: agent.wire.read_progress().entered_step == 6)
    sixth.join(0.2)
    assert sixth.is_alive()
    assert not agent.wire.read_seals()
    held.goes_on.set()
    sixth.join(20)
    assert sealed(agent, 3) == 3
    agent.settle()
    held.value = 6
    held.session.complete_step(6)
    eventually(lambda: any(seal.step == 6 for seal in agent.wire.read_seals()))
    assert [sealed(agent, 3), sealed(agent, 6)] == [3, 6]
    assert held.session.skipped == 0


def test_none_is_begun_while_one_is_copied_that_was_not_to_be_expected(agent, held):
    held.goes_on.clear()
    held.train(1, 2, 3)
    held.session.enter_step(4)
    agent.order(snapshot_every=1)
    held.session.complete_step(4)
    assert held.session.skipped == 1
    assert not agent.wire.read_seals()
    held.goes_on.set()
    eventually(agent.wire.read_seals)
    assert [seal.step for seal in agent.wire.read_seals()] == [3]


def test_the_end_of_the_training_waits_for_it_and_seals_the_last_step(agent, held):
    held.goes_on.clear()
    held.train(1, 2, 3, 4)
    timer = threading.Thread(target=lambda: (agent.order(snapshot_every=3), held.goes_on.set()))
    timer.start()
    held.session.finish()
    timer.join()
    assert agent.wait_for("sealed", 2)["step"] == 4
    assert [sealed(agent, 3), sealed(agent, 4)] == [3, 4]


def test_a_drain_waits_for_it_and_has_nothing_more_to_write(agent, held, monkeypatch):
    class Ended(Exception):
        pass

    def end(timeout_s: float | None = 0.0) -> None:
        if timeout_s is None:
            raise Ended

    monkeypatch.setattr(held.session, "_receive", end)
    held.goes_on.clear()
    held.train(1, 2)
    agent.order(hold=1, drain_step=3)
    held.session.enter_step(3)
    held.value = 3
    agent.order(hold=0, drain_step=0)
    held.session.complete_step(3)
    agent.order(hold=1, drain_step=3)
    held.goes_on.set()
    with pytest.raises(Ended):
        held.session.enter_step(4)
    assert agent.wait_for("drained") == {"kind": "drained", "step": 3, "sealed": True}
    assert sealed(agent, 3) == 3
    assert [name[:13] for name in held.threads] == ["keepstep-copy"]


def test_what_can_not_be_written_is_raised_where_the_training_is(agent, held):
    held.wrong = SlabError("a tensor of another size")
    held.train(1, 2, 3)
    eventually(lambda: held.session._slabs._copy.done())
    with pytest.raises(SlabError, match="of another size"):
        held.train(4)
    assert not agent.wire.read_seals()
    held.wrong = None
    held.train(5, 6)  # its slab is still to be had
    eventually(agent.wire.read_seals)
    assert sealed(agent, 6) == 6


@pytest.mark.parametrize(
    "why",
    [
        "it does not last",
        "no room",
        "steps are short",
        "the next is due soon",
        "it is small",
        "the first",
        "others",
    ],
)
def test_what_can_not_be_left_is_written_at_once(agent, held, monkeypatch, why):
    held.lasts = why != "it does not last"
    if why == "steps are short":
        held.session._slabs._copy_ns = 10**15
    if why == "the first":
        held.session._slabs._copy_ns = 0
    if why == "it is small":
        monkeypatch.setattr(snapshots, "_BESIDE_BYTES_MIN", 9000)
    if why == "others":
        monkeypatch.setattr(slab, "SHARE_BYTES", 1)
    if why == "the next is due soon":
        agent.order(snapshot_every=1)
    monkeypatch.setattr(memory, "has_room", lambda size_bytes: why != "no room")
    held.train(1, 2, 3) if why != "the next is due soon" else held.train(3)
    assert sealed(agent, 3) == 3
    assert held.threads == [threading.current_thread().name]
    assert 1 < held.session._slabs._copy_ns < 10**15, "how long it took is what the next one goes by"


def test_how_much_it_took_beside_the_steps_is_told(agent, held):
    held.goes_on.clear()
    held.train(1, 2, 3)
    assert agent.wire.read_progress().snapshot_ns == 0, "what it takes is not known before"
    held.goes_on.set()
    cost_ns, stall_ns = held.session._slabs._copy.result().cost_ns, held.session._stall_ns
    assert cost_ns > 0
    held.train(4)
    assert agent.wire.read_progress().snapshot_ns >= stall_ns + cost_ns


def test_whether_there_is_room_is_found_out_beside_the_steps(agent, held, monkeypatch):
    asked = []
    monkeypatch.setattr(snapshots, "_STEP_RATIO", 1e9)
    monkeypatch.setattr(memory, "has_room", lambda size_bytes: asked.append(threading.current_thread().name) or True)
    for step in range(1, 10):
        held.train(step)
        held.session._settle(wait=True)
        agent.settle()
    assert [name.startswith("keepstep-copy") for name in asked] == [False, True, True, True]
