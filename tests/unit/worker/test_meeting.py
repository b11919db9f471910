"""A worker waits until whoever leads its cluster listens."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from keepstep_worker import meeting
from keepstep_worker.meeting import await_leader


@pytest.fixture
def place():
    """A socket that is bound and does not listen: its port is nobody else's."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made; nothing waits."""
    made = []
    monkeypatch.setattr(meeting.time, "sleep", made.append)
    return made


def config(place: socket.socket, **task: object) -> dict[str, str]:
    cluster = {"worker": [f"127.0.0.1:{place.getsockname()[1]}", "127.0.0.1:1"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1, **task}})}


def test_it_returns_once_the_leader_listens(place, monkeypatch):
    tried = threading.Event()
    monkeypatch.setattr(meeting, "PATIENCE_S", float("inf"))
    monkeypatch.setattr(meeting.time, "sleep", lambda _: tried.set())
    waiting = threading.Thread(target=await_leader, args=("/job:worker/replica:0/task:0", config(place)), daemon=True)
    waiting.start()
    assert tried.wait(60) and waiting.is_alive()
    place.listen()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_leader_that_listens_is_not_waited_for(place, pauses):
    place.listen()
    await_leader("/job:worker/task:0", config(place))
    assert pauses == []
    place.settimeout(60)
    place.accept()[0].close()  # it was called


def test_a_leader_that_never_comes_is_tensorflows_affair(place, pauses, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(meeting.time, "monotonic", lambda: float(next(clock)))
    await_leader("/job:worker/replica:0/task:0", config(place))
    assert pauses[0] < pauses[1] < pauses[-1] and len(pauses) < meeting.PATIENCE_S


@pytest.mark.parametrize(
    ("name", "tf_config"),
    [
        ("", None),
        ("localhost", None),
        ("/job:worker/replica:0/task:1", None),
        ("/job:chief/replica:0/task:0", None),
        ("/job:worker/replica:0/task:9", None),
        ("/job:worker/replica:0/task:0", ""),
        ("/job:worker/replica:0/task:0", "{"),
        ("/job:worker/replica:0/task:0", "[]"),
        ("/job:worker/replica:0/task:0", "7"),
        ("/job:worker/replica:0/task:0", '{"cluster": {"worker": [7]}, "task": {"type": "worker", "index": 1}}'),
        ("/job:worker/replica:0/task:0", '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 1}}'),
        ("/job:worker/replica:0/task:0", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}'),
        (
            "/job:worker/replica:0/task:0",
            '{"cluster": {"worker": ["::1:70000"]}, "task": {"type": "worker", "index": 1}}',
        ),
        (
            "/job:worker/replica:0/task:0",
            f'{{"cluster": {{"worker": ["{"a" * 64}.b:1"]}}, "task": {{"type": "worker", "index": 1}}}}',
        ),
    ],
)
def test_nobody_is_waited_for_where_it_is_this_one_or_unknown(place, pauses, name, tf_config):
    await_leader(name, config(place) if tf_config is None else {"TF_CONFIG": tf_config})
    assert pauses == []
