"""A job that the platform starts again counts its restarts on, unless it has come to an end before."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.container import LOOP, Container

SETTINGS = ("checkpoint.snapshot_every=4 steps", "checkpoint.every=8 steps", "restart.ceiling=1")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@contextlib.contextmanager
def attempt(folder: Path, store: Path) -> Iterator[Container]:
    """One attempt on a machine of its own, that trains and has lost its first worker."""
    with Container(folder) as container:
        container.fill()
        container.write("code/train.py", LOOP.replace("PLAN", "pass"))
        container.options += ["--store", str(store), *(word for setting in SETTINGS for word in ("--set", setting))]
        container.start()
        container.wait_for(lambda: "first_step_completed" in kinds(container), "step")
        container.kill_worker()
        yield container


def kinds(container: Container) -> list[str]:
    return [event["kind"] for event in container.events()]


def test_the_ceiling_holds_over_attempts_and_not_beyond_an_end(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with attempt(tmp_path / "first", store) as first:
        first.wait_for(lambda: "charges_kept" in kinds(first), "charges")
        first.signal(signal.SIGKILL)  # and all that it has started, as it is with a machine that is lost
    with attempt(tmp_path / "second", store) as second:
        assert second.wait() == 137, second.output()
        assert "ceiling_reached: killed on algo-1 rank 0" in (second.failure() or "")
    with attempt(tmp_path / "third", store) as third:
        third.wait_for(lambda: kinds(third).count("first_step_completed") > 1, "step after a restart")
        third.write("enough", "")
        assert third.wait() == 0, third.output()
