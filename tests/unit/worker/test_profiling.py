"""A profile of some steps, asked for while the worker trains: begun and ended between steps, and never its end."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import types

import pytest

from keepstep_worker.wire import StepTimes
from tests.support.fake_agent import FakeAgent


class Tracer:
    """Where a script finds TensorFlow's profiler: what was started and stopped, and what it refuses."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refuses = ""
        self.at_ns: list[int] = []
        self.gpus: list[str] = []
        self.switch: ctypes.c_int | None = None
        self.dies: list[int] = []
        self.full = False
        self.hangs: list[int] = []
        self.works_s = 0.0
        self.frees = 0
        self.pid = os.getpid()

    def ProfilerOptions(self, host_tracer_level: int) -> str:
        return f" of level {host_tracer_level}"

    def start(self, folder: str, options: str = "") -> None:
        if self.refuses == "start" or (self.done and self.done[-1] != "stop"):
            raise ValueError("another profiler is running")
        self.done.append(folder + options)
        self.at_ns.append(time.monotonic_ns())

    def stop(self, save: bool = True) -> None:
        self.done.append("stop")
        self.at_ns.append(time.monotonic_ns())
        if self.refuses == "stop" or (self.full and os.getpid() != self.pid):
            raise OSError("no space left on device")
        if os.getpid() != self.pid and self.profiles in self.dies:
            os.kill(os.getpid(), signal.SIGSEGV)
        if os.getpid() != self.pid and self.profiles in self.hangs:
            threading.Event().wait()
        if os.getpid() != self.pid and self.frees:
            self.give_back()
        while os.getpid() != self.pid and time.process_time() < self.works_s:
            pass

    def give_back(self) -> None:
        """Free the same memory several times, of which a process dies that takes it back."""
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        place = ctypes.c_void_p(library.malloc(ctypes.c_size_t(100_000)))
        for _ in range(self.frees):
            library.free(place)

    @property
    def profiles(self) -> int:
        return len([each for each in self.done if each != "stop"])


@pytest.fixture
def tracer(monkeypatch):
    made = Tracer()
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.profiler = types.SimpleNamespace(experimental=made)
    tensorflow.config = types.SimpleNamespace(list_logical_devices=lambda kind: made.gpus if kind == "GPU" else [])
    monkeypatch.setattr("keepstep_worker.profile_writing.switch_of", lambda tensorflow: made.switch)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    return made


@pytest.fixture
def agent():
    made = Asking()
    yield made
    made.close()


class Asking(FakeAgent):
    """An agent that asks for profiles."""

    endpoint: socket.socket

    def connect(self, **orders: int) -> socket.socket:
        theirs = super().connect(**orders)
        self.endpoint = self._ours
        return theirs

    def tell(self, number: int, steps: int = 3, seconds: float = 600.0) -> None:
        wish = {"kind": "profile", "number": number, "folder": f"/profile/{number}", "steps": steps, "seconds": seconds}
        self.endpoint.send(json.dumps(wish).encode())

    def ask(self, number: int, **how: float) -> None:
        self.tell(number, **how)
        self.order(profile=number)


def train(session, *steps):
    for step in steps:
        session.enter_step(step)
        session.complete_step(step)


def answer(number, error=""):
    return {"kind": "profiled", "number": number, "error": error}


def test_some_steps_are_profiled(agent, tracer):
    session = agent.session()
    train(session, 1, 2)
    assert tracer.done == []
    agent.ask(1)
    train(session, 3, 4, 5)
    assert tracer.done == ["/profile/1"]
    train(session, 6)
    assert tracer.done == ["/profile/1", "stop"]
    assert agent.wait_for("profiled") == answer(1)
    train(session, *range(7, 20))
    assert len(tracer.done) == 2
    agent.ask(2)
    train(session, 20, 21, 22, 23)
    assert tracer.done[2:] == ["/profile/2", "stop"]
    assert agent.wait_for("profiled", 2) == answer(2)


def test_it_lasts_no_longer_than_the_agent_wants_but_a_step(agent, tracer):
    session = agent.session()
    agent.ask(1, seconds=0.0)
    train(session, 1, 2)
    assert tracer.done == ["/profile/1", "stop"]


def test_its_time_is_no_work_of_the_rank(agent, tracer):
    session = agent.session()
    agent.ask(1, steps=1)
    for step in (1, 2):
        session.enter_step(step)
        session.complete_step(step, StepTimes(gradients_ready_ns=session.start_ns + 1, end_ns=session.start_ns + 2))
    train(session, 3)
    records, _ = agent.wire.read_since(0)
    pairs = zip(records[:2], tracer.at_ns, strict=True)
    assert all(record.start_ns < at_ns <= record.end_ns for record, at_ns in pairs)
    assert records[1].start_ns >= records[0].end_ns and records[2].start_ns >= records[1].end_ns


def test_the_order_may_come_before_the_message(agent, tracer):
    session = agent.session()
    agent.order(profile=1)
    train(session, 1, 2)
    assert tracer.done == []
    agent.tell(1, steps=1)
    train(session, 3, 4)
    assert tracer.done == ["/profile/1", "stop"]


def test_what_was_asked_of_the_worker_before_is_no_concern_of_the_next(agent, tracer):
    session = agent.session(profile=4)
    train(session, 1, 2)
    agent.ask(5, steps=1)
    train(session, 3, 4)
    assert tracer.done == ["/profile/5", "stop"]


def test_the_end_of_the_training_is_the_end_of_its_profile(agent, tracer):
    session = agent.session()
    agent.ask(1)
    train(session, 1, 2)
    session.finish()
    assert tracer.done == ["/profile/1", "stop"]
    assert agent.wait_for("profiled") == answer(1)


@pytest.mark.parametrize(
    ("refuses", "error"),
    [("start", "ValueError: another profiler is running"), ("stop", "OSError: no space left on device")],
)
def test_a_profiler_that_fails_is_told_of_and_the_training_goes_on(agent, tracer, refuses, error):
    session = agent.session()
    tracer.refuses = refuses
    agent.ask(1, steps=1)
    train(session, 1, 2, 3)
    assert agent.wait_for("profiled") == answer(1, error)
    tracer.refuses = ""
    agent.ask(2, steps=1)
    train(session, 4, 5)
    assert agent.wait_for("profiled", 2) == answer(2)


def test_a_script_without_tensorflow_has_none(agent, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    session = agent.session()
    agent.ask(1)
    train(session, 1)
    assert agent.wait_for("profiled") == answer(1, "LookupError: the script has not imported TensorFlow")
    assert "tensorflow" not in sys.modules


def test_a_message_that_makes_no_sense_is_told_of(agent, tracer):
    session = agent.session()
    agent.endpoint.send(json.dumps({"kind": "profile", "number": 1, "folder": "/profile/1"}).encode())
    agent.order(profile=1)
    train(session, 1, 2)
    assert agent.wait_for("profiled")["error"].startswith("KeyError")
    assert tracer.done == []


def test_it_gives_way_to_a_profile_of_the_scripts_own(agent, tracer):
    session = agent.session()
    original = tracer.start
    agent.ask(1)
    train(session, 1)
    assert tracer.done == ["/profile/1"]
    tracer.start("/its/own")
    assert tracer.done == ["/profile/1", "stop", "/its/own"]
    assert agent.wait_for("profiled") == answer(1)
    assert tracer.start == original
    train(session, 2, 3)
    assert tracer.done[-1] == "/its/own"


# --- where a copy of the process writes it down ----------------------------------------------------------------------


@pytest.fixture
def dangerous(tracer):
    """A profiler that the process may die of when it is ended."""
    tracer.switch = ctypes.c_int(2)
    return tracer


def until(session, step, look):
    """Train on until `look` is true; the newest step."""
    patience = time.monotonic() + 30.0
    while not look():
        assert time.monotonic() < patience
        step += 1
        train(session, step)
    return step


def test_a_copy_of_the_process_writes_it_down(agent, dangerous):
    session = agent.session()
    agent.ask(1, steps=1)
    train(session, 1, 2)
    assert dangerous.done == ["/profile/1", "stop"]  # of this process: here nothing is saved
    assert dangerous.switch.value == -1
    until(session, 2, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1)


def test_what_the_copy_dies_of_is_none_of_the_trainings(agent, dangerous):
    dangerous.dies = [1, 2]
    session = agent.session()
    agent.ask(1, steps=1)
    until(session, 0, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1)
    assert dangerous.done == ["/profile/1", "stop"] * 3


def test_a_copy_that_always_dies_is_told_of(agent, dangerous):
    dangerous.dies = [1, 2, 3]
    session = agent.session()
    agent.ask(1, steps=1)
    step = until(session, 0, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1, "the process that writes it down was ended by signal 11")
    dangerous.dies = []
    agent.ask(2, steps=1)
    until(session, step, lambda: len(agent.of("profiled")) == 2)
    assert agent.wait_for("profiled", 2) == answer(2)


def test_a_copy_that_meets_a_lock_is_ended_and_another_one_made(agent, dangerous, monkeypatch):
    monkeypatch.setattr("keepstep_worker.profile_writing.STUCK_S", 0.5)
    dangerous.hangs = [1, 2]
    session = agent.session()
    agent.ask(1, steps=1)
    until(session, 0, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1)
    assert dangerous.done == ["/profile/1", "stop"] * 3


def test_a_copy_that_always_meets_a_lock_is_told_of(agent, dangerous, monkeypatch):
    monkeypatch.setattr("keepstep_worker.profile_writing.STUCK_S", 0.5)
    dangerous.hangs = [1, 2, 3]
    session = agent.session()
    agent.ask(1, steps=1)
    until(session, 0, lambda: agent.of("profiled"))
    wrong = "the process that writes it down was ended by signal 9: it did nothing for 0.5 s"
    assert agent.wait_for("profiled") == answer(1, wrong)


def test_a_copy_that_is_slow_is_let_work(agent, dangerous, monkeypatch):
    monkeypatch.setattr("keepstep_worker.profile_writing.STUCK_S", 0.5)
    dangerous.works_s = 2.0  # a copy's clock begins at zero
    session = agent.session()
    agent.ask(1, steps=1)
    until(session, 0, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1)
    assert dangerous.done == ["/profile/1", "stop"]


def test_the_end_of_the_training_waits_no_longer_than_it_should(agent, dangerous, monkeypatch):
    monkeypatch.setattr("keepstep_worker.profile_writing.WAITS_S", 0.5)
    dangerous.works_s = 1e9
    session = agent.session()
    agent.ask(1)
    train(session, 1, 2)
    session.finish()
    wrong = "the process that writes it down was ended by signal 9: it was not done 0.5 s after it was waited for"
    assert agent.wait_for("profiled") == answer(1, wrong)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="how it is done is this processor's")
def test_a_copy_does_not_die_of_what_was_given_back_twice(agent, dangerous):
    dangerous.frees = 2
    session = agent.session()
    agent.ask(1, steps=1)
    until(session, 0, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1)
    assert dangerous.done == ["/profile/1", "stop"]


def test_what_the_copy_can_not_write_is_told_of_and_not_tried_again(agent, dangerous):
    dangerous.full = True
    session = agent.session()
    agent.ask(1, steps=1)
    until(session, 0, lambda: agent.of("profiled"))
    assert agent.wait_for("profiled") == answer(1, "OSError: no space left on device")
    assert dangerous.done == ["/profile/1", "stop"]


def test_the_end_of_the_training_waits_for_what_is_being_written(agent, dangerous):
    session = agent.session()
    agent.ask(1)
    train(session, 1, 2)
    session.finish()
    assert agent.wait_for("profiled") == answer(1)


def test_on_gpus_the_host_is_left_out_and_nothing_copied(agent, dangerous):
    dangerous.gpus = ["GPU:0"]
    session = agent.session()
    agent.ask(1, steps=1)
    train(session, 1, 2)
    assert dangerous.done == ["/profile/1 of level 0", "stop"] and dangerous.switch.value == 2
    assert agent.wait_for("profiled") == answer(1)
