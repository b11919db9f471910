"""A worker that waits for others can be asked whether its own part of the step is done."""

from __future__ import annotations

import json
import socket

import pytest

from keepstep_worker import inquiry, probe, wire
from keepstep_worker.channel import Channel


class Asker:
    """The agent's end, and a worker that has just offered to be asked."""

    def __init__(self, start_ns: int) -> None:
        self._agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(worker)
        inquiry.offer(self.channel, lambda: start_ns)
        packet, fds, *_ = socket.recv_fds(self._agent, 65536, 4)
        self.told = json.loads(packet)
        self.line = socket.socket(fileno=fds[0])
        self.line.settimeout(20)
        self._asked = 0

    def ask(self, what: str = wire.READY) -> object:
        self._asked += 1
        self.line.send(f"{self._asked} {what}".encode())
        answer = json.loads(self.line.recv(wire.ANSWER_BYTES_MAX))
        assert answer["to"] == self._asked
        return answer["said"]

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
        self.channel.close()
        self._agent.close()


@pytest.mark.parametrize("ready", [True, False, None])
def test_the_answer_is_the_probes(ready, monkeypatch):
    asked = []
    monkeypatch.setattr(probe, "is_ready", lambda start_ns: asked.append(start_ns) or ready)
    with Asker(77) as asker:
        assert asker.told == {"kind": wire.INQUIRIES}
        assert [asker.ask(), asker.ask()] == [ready, ready]
    assert asked == [77, 77]


def test_before_the_first_step_nothing_is_known(monkeypatch):
    monkeypatch.setattr(probe, "is_ready", lambda start_ns: True)
    with Asker(0) as asker:
        assert asker.ask() is None


def test_a_probe_that_fails_knows_nothing(monkeypatch):
    def fails(start_ns: int) -> bool:
        raise RuntimeError("no such resource")

    monkeypatch.setattr(probe, "is_ready", fails)
    with Asker(5) as asker:
        assert asker.ask() is None


def test_stacks_are_written_where_the_script_has_left_their_file_open(tmp_path, monkeypatch):
    monkeypatch.setattr(inquiry, "_stacks", None)
    with Asker(5) as asker:
        assert asker.ask(wire.STACKS) is None
        with (tmp_path / "stacks").open("w") as file:
            monkeypatch.setattr(inquiry, "_stacks", file)
            assert asker.ask(wire.STACKS) is True
        assert "test_stacks_are_written" in (tmp_path / "stacks").read_text()
        assert asker.ask(wire.STACKS) is None


def test_what_was_not_measured_is_not_known(monkeypatch):
    monkeypatch.setattr(probe, "_probe", probe._Probe())
    assert probe.is_ready(5) is None
    probe._probe.stamps["gradients"].eager_ns = 7
    assert [probe.is_ready(5), probe.is_ready(9)] == [True, False]
    probe._probe.off = True
    assert probe.is_ready(5) is None
