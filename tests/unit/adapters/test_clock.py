"""The agent's two time scales."""

from __future__ import annotations

import time

from keepstep.adapters import clock


def test_a_clock_goes_on_evenly_when_the_systems_clock_is_set(monkeypatch):
    system = {"unix": 1_000.0, "monotonic": 50.0}
    monkeypatch.setattr(time, "time", lambda: system["unix"])
    monkeypatch.setattr(time, "monotonic", lambda: system["monotonic"])
    ticking = clock.Clock()
    assert (ticking.now(), ticking.monotonic()) == (1_000.0, 50.0)
    system.update(unix=3.0, monotonic=52.5)
    assert (ticking.now(), clock.unix_time(), clock.monotonic()) == (1_002.5, 3.0, 52.5)


def test_the_scales_translate_into_each_other():
    ticking = clock.Clock()
    now = ticking.now()
    assert abs(ticking.to_unix(ticking.to_monotonic(now)) - now) < 1e-6
    assert abs(clock.monotonic_ns() / 1e9 - ticking.to_monotonic(ticking.now())) < 60
