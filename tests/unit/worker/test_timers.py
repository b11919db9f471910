"""TensorFlow's times are filled in where nobody names them, and only there."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from keepstep_worker import timers


class Context:
    """As TensorFlow's, as far as the coordination service goes."""

    def __init__(self) -> None:
        self.configured: dict[str, object] = {}

    def configure_coordination_service(
        self, service_type, service_leader="", cluster_register_timeout_in_ms=0, heartbeat_timeout_in_ms=0
    ):
        self.configured = {"register": cluster_register_timeout_in_ms, "heartbeat": heartbeat_timeout_in_ms}


class OlderContext:
    """Without these times."""

    def configure_coordination_service(self, service_type):
        self.configured = service_type


@pytest.fixture
def install(monkeypatch):
    def installed(kind):
        copied = type(kind.__name__, (), dict(vars(kind)))
        module = ModuleType("context")
        module.Context = copied
        timers.install(module)
        return copied()

    monkeypatch.setenv("KEEPSTEP_HEARTBEAT_S", "6")
    monkeypatch.setenv("KEEPSTEP_REGISTER_S", "1200")
    return installed


def test_what_is_not_named_is_filled_in(install):
    context = install(Context)
    context.configure_coordination_service(service_type="standalone", service_leader="/job:worker")
    assert context.configured == {"register": 1_200_000, "heartbeat": 6_000}


def test_what_the_script_names_stands(install):
    context = install(Context)
    context.configure_coordination_service("standalone", heartbeat_timeout_in_ms=77)
    assert context.configured == {"register": 1_200_000, "heartbeat": 77}


@pytest.mark.parametrize("said", [None, "", "soon"])
def test_a_time_that_is_not_told_is_tensorflows_own(install, monkeypatch, said):
    context = install(Context)
    monkeypatch.delenv("KEEPSTEP_HEARTBEAT_S")
    if said is not None:
        monkeypatch.setenv("KEEPSTEP_HEARTBEAT_S", said)
    context.configure_coordination_service("standalone")
    assert context.configured == {"register": 1_200_000, "heartbeat": 0}


def test_an_older_tensorflow_is_left_alone(install):
    context = install(OlderContext)
    context.configure_coordination_service("standalone")
    assert context.configured == "standalone"
    timers.install(SimpleNamespace())


@pytest.mark.parametrize("named", [("standalone", "/job:worker/replica:0/task:0"), ("standalone",)])
def test_the_leader_is_waited_for_before_anything_is_configured(install, monkeypatch, named):
    context, awaited = install(Context), []
    monkeypatch.setattr(timers, "await_leader", lambda name: awaited.append((name, dict(context.configured))))
    context.configure_coordination_service(*named)
    assert awaited == [(named[1] if len(named) > 1 else "", {})]
    assert context.configured
